# SPDX-License-Identifier: Apache-2.0
"""The reference formats of quantized weights themselves: packing, rounding, and known values.

`FORMATS` were once compared with the packages of the formats, in an environment of their own: the weights are
equal to those of the decompressors of compressed-tensors 0.20.0 (where columns with an activation order were
sorted by group first, because that version supports no such order) and of AutoAWQ 0.2.9 (`dequantize_gemm`),
and the stored tensors of GPTQ to those of GPTQModel 7.7.0 (`pack_original`, and its subtraction for version
1). Transformers 5.23.0 with accelerate loads the checkpoints in blocks of FP8 with equal weights.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import e4m3
from bit_packing import AWQ_ORDER, pack, unpack
from integer_codes import group_columns, round_to_integers
from integer_formats import Gptq
from quantized_formats import FORMATS, FP8, INT8, PACKED
from rounded_activations import multiply, round_activations, round_static
from weight_format import to_numpy

SHAPES = ((64, 128), (192, 320), (136, 384))
"""Shapes of weights; 192, 320 and 136 are no multiples of a block's 128."""


def random_weight(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Return a weight whose rows differ in magnitude by up to 1000."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-2, 1, (rows, 1))
    return (rng.normal(size=(rows, columns)) * sizes).astype(np.float32)


def test_e4m3_has_the_values_of_torch() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(e4m3.decode(codes), expected)
    assert e4m3.decode(np.array([0x01, 0x38, 0x7E, 0xC4], np.uint8)).tolist() == [2**-9, 1, 448, -3]
    assert np.isnan(e4m3.decode(np.array(e4m3.NAN_CODES))).all()


@settings(max_examples=60, deadline=None)
@given(arrays.arrays(np.float32, 64, elements=st.floats(-448, 448, width=32)))
def test_e4m3_rounds_as_torch(values: np.ndarray) -> None:
    expected = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(e4m3.encode(values), expected)


def test_e4m3_rounds_ties_to_even_and_saturates() -> None:
    values = np.array([17, 19, 449, -1e30, 2**-10, 3 * 2**-10])
    assert e4m3.decode(e4m3.encode(values)).tolist() == [16, 20, 448, -448, 0, 2**-8]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from((4, 8)),
    st.sampled_from((0, 1)),
    st.booleans(),
    st.integers(1, 5),
    st.integers(1, 40),
    st.randoms(use_true_random=False),
)
def test_packing_keeps_every_integer(
    bits: int, axis: int, awq: bool, rows: int, count: int, random: st.DataObject
) -> None:
    codes = np.array([[random.randrange(2**bits) for _ in range(count)] for _ in range(rows)])  # type: ignore[attr-defined]
    codes = codes if axis else codes.T
    order = AWQ_ORDER if awq and bits == 4 else None
    words = pack(codes, bits, axis, order)
    assert words.dtype == np.int32 and words.shape[axis] == -(-count * bits // 32)
    np.testing.assert_array_equal(unpack(words, bits, axis, count=count, order=order), codes)


def test_packing_puts_the_first_integer_into_the_lowest_bits() -> None:
    codes = np.arange(1, 9)[None]
    assert pack(codes, 4, 1).view(np.uint32).tolist() == [[0x87654321]]
    assert pack(codes, 4, 1, AWQ_ORDER).view(np.uint32).tolist() == [[0x86427531]]
    assert pack(codes, 8, 1).view(np.uint32).tolist() == [[0x04030201, 0x08070605]]


def test_gptq_v1_borrows_for_zero_points_of_zero() -> None:
    shift = Gptq()._shift
    stored = shift(np.array([[0x88888888, 0x00000010]], np.uint32).view(np.int32), -1).view(np.uint32)
    assert stored.tolist() == [[0x77777777, 0xEEEEEEFF]]
    assert shift(stored.view(np.int32), 1).view(np.uint32).tolist() == [[0x88888888, 0x00000010]]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_integers_are_within_half_a_step(bits: int, symmetric: bool) -> None:
    weight = random_weight(16, 128)
    values = round_to_integers(
        weight, group_columns(128, 32), bits=bits, symmetric=symmetric, scale_dtype=torch.float32
    )
    steps = np.abs(values.dequantize() - weight) / values.scales[:, values.groups]
    assert steps.max() <= (0.501 if symmetric else 1.001)
    assert values.codes.min() == 0 and values.codes.max() == 2**bits - 1


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (name, shape)
        for name, weight_format in FORMATS.items()
        for shape in SHAPES
        if shape[1] % getattr(weight_format, "group_size", 1) == 0
    ],
)
def test_rounded_weights_are_near(name: str, shape: tuple[int, int]) -> None:
    weight_format = FORMATS[name]
    weight = random_weight(*shape)
    tensors = weight_format.quantize(weight, np.random.default_rng(0))
    rounded = weight_format.dequantize(tensors)
    assert rounded.dtype == np.float32 and rounded.shape == weight.shape
    error = np.abs(rounded - weight)
    scales = to_numpy(tensors[weight_format.scale_name])
    if name in FP8:
        assert (error <= np.maximum(np.abs(weight) * 2**-4, scales.max() * 2**-10) * 1.01).all()
    else:
        row_steps = scales.max(axis=0) if scales.shape[-1] == len(weight) else scales.max(axis=1)
        clipped = 2 ** getattr(weight_format, "bits", 8) * 2**-9  # the rounding of scales to bfloat16
        assert (error <= row_steps[:, None] * (1.01 + clipped)).all()


@pytest.mark.parametrize("name", PACKED)
def test_reader_recovers_the_quantizers_integers(name: str) -> None:
    weight_format, weight = PACKED[name], random_weight(64, 256)
    tensors = weight_format.quantize(weight, np.random.default_rng(0))
    order = tensors.get("g_idx", tensors.get("weight_g_idx"))
    size = vars(weight_format)["group_size"]
    assert (order is None) == (name.startswith("awq") or (name.startswith("ct-") and "act-order" not in name))
    expected = round_to_integers(
        weight,
        group_columns(256, size) if order is None else order.numpy(),
        bits=getattr(weight_format, "bits", 4),
        symmetric=getattr(weight_format, "symmetric", False),
        scale_dtype=torch.bfloat16 if name.startswith("ct-") else torch.float16,
    )
    np.testing.assert_array_equal(weight_format.dequantize(tensors), expected.dequantize())
    if "act-order" in name:
        assert order is not None and np.bincount(order.numpy()).tolist() == [size] * (256 // size)
        assert (np.diff(order.numpy()) < 0).any()


@pytest.mark.parametrize("kind", ["e4m3", "int8"])
def test_activations_are_rounded_with_scales_of_tokens_or_groups(kind: str) -> None:
    x = random_weight(5, 256)
    x[2] = 0
    for rounded in (round_activations(x, kind), round_activations(x, kind, group=128)):  # type: ignore[arg-type]
        limit = np.abs(x) * 2**-4 + np.abs(x).max(axis=1, keepdims=True) / 254
        assert (np.abs(rounded - x) <= limit * 1.01).all() and not rounded[2].any()
    assert round_static(np.array([1.0, 9.0, -9.0]), "int8", 0.0625, 8).tolist() == [1.0, 7.4375, -8.5]
    assert multiply(np.ones((1, 2)), np.array([[1.0, 2.0]])).tolist() == [[3.0]]


def test_int8_weights_are_signed() -> None:
    tensors = INT8["ct-int8-asymmetric"].quantize(
        np.array([[-1.0, 1.0, 0.5]], np.float32), np.random.default_rng(0)
    )
    assert tensors["weight"].dtype == torch.int8 and tensors["weight"].tolist() == [[-127, 127, 64]]
    assert tensors["input_zero_point"].dtype == torch.int8
