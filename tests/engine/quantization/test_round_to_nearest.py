# SPDX-License-Identifier: Apache-2.0
"""Weights that are quantized while they are loaded: compared exactly with independent quantizers in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import e4m3
from integer_codes import group_columns, round_to_integers
from mizzen.layers.quantized import round_to_nearest
from mizzen.layers.quantized.canonical import Codes
from mizzen.layers.quantized.round_to_nearest import check_columns, round_weight
from mizzen.models.hf_fields import ConfigError
from mizzen.quantization.online import ONLINE_SCHEMES, choose_quantization
from mizzen.quantization.quantization import Quantization
from mizzen.quantization.schemes import ActivationScales, PackedIntegers, Packing, Unquantized
from rounded_weights import row_scales


def make_weight(rows: int = 37, columns: int = 320, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a weight whose rows differ in size by up to 10,000, with a row and a group of zeros."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    weight *= torch.logspace(-2, 2, rows)[:, None]
    weight[3] = 0
    weight[4, 128:256] = 0
    weight[5, 7] = 3e4
    return weight.to(dtype)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round a few rows at a time, so that the blocks do not divide the rows."""
    monkeypatch.setattr(round_to_nearest, "BLOCK_ELEMENTS", 5 * 320)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fp8_codes_equal_those_of_the_definition(dtype: torch.dtype) -> None:
    weight = make_weight(dtype=dtype)
    found = round_weight(weight, ONLINE_SCHEMES["fp8"])
    values = weight.float().numpy()
    scales = row_scales(values, 448)
    assert found.codes is Codes.E4M3
    assert found.activations is not None and found.activations.scales is ActivationScales.TOKEN
    assert np.array_equal(found.scales.numpy(), scales)
    codes = e4m3.encode(values / scales)
    assert np.array_equal(found.values.view(torch.uint8).numpy() & 0x7F, codes & 0x7F)
    assert np.array_equal(found.dequantize().numpy(), e4m3.decode(codes) * scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_int8_codes_equal_those_of_the_definition(dtype: torch.dtype) -> None:
    weight = make_weight(dtype=dtype)
    found = round_weight(weight, ONLINE_SCHEMES["int8"])
    values = weight.float().numpy()
    scales = row_scales(values, 127)
    assert found.codes is Codes.INT8
    assert found.activations is None
    assert np.array_equal(found.scales.numpy(), scales)
    assert np.array_equal(found.values.numpy(), np.clip(np.rint(values / scales), -127, 127).astype(np.int8))


@pytest.mark.parametrize("columns", [320, 256, 96])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_4_bit_codes_equal_those_of_the_reference_quantizer(columns: int, dtype: torch.dtype) -> None:
    """The last group may be incomplete, or the only one."""
    weight = make_weight(columns=320, dtype=dtype)[:, :columns]
    found = round_weight(weight, ONLINE_SCHEMES["w4a16"])
    wanted = round_to_integers(
        weight.float().numpy(),
        group_columns(columns, 128),
        bits=4,
        symmetric=True,
        scale_dtype=torch.bfloat16,
    )
    assert found.codes is Codes.UINT4
    assert found.scales.dtype == torch.bfloat16
    assert np.array_equal(found.unpack().numpy(), wanted.codes)
    assert np.array_equal(found.scales.float().numpy(), wanted.scales)
    assert np.array_equal(found.dequantize().numpy(), wanted.dequantize())


@pytest.mark.parametrize(("name", "bound"), [("fp8", 1 / 16), ("int8", 1 / 254), ("w4a16", 1 / 14)])
def test_the_error_of_an_element_is_bounded(name: str, bound: float) -> None:
    """E4M3 has four significant bits; the error of integers is relative to the largest value they share."""
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    error = (round_weight(weight, ONLINE_SCHEMES[name]).dequantize() - weight).abs()
    peaks = weight.abs().amax(dim=1, keepdim=True)
    size = weight.abs() + peaks * 2**-9 / 448 if name == "fp8" else peaks
    assert bool((error <= 1.01 * bound * size).all())
    assert bool((error > bound / 3 * size).any())


def test_tiny_weights_stay_finite() -> None:
    weight = torch.full((2, 128), 1e-40)
    for scheme in ONLINE_SCHEMES.values():
        found = round_weight(weight, scheme).dequantize()
        assert bool(found.isfinite().all())
        assert float(found.abs().max()) <= 2e-37


def test_weights_that_do_not_fill_whole_bytes_and_other_schemes_are_refused() -> None:
    message = "w4a16 needs an even number of input columns, but a rank holds 3 of q_proj: use fp8 or int8"
    with pytest.raises(ConfigError, match=message):
        check_columns("q_proj", 3, ONLINE_SCHEMES["w4a16"])
    check_columns("q_proj", 3, ONLINE_SCHEMES["fp8"])
    with pytest.raises(ValueError, match="cannot be quantized to"):
        round_weight(torch.ones(2, 4), Unquantized())


def test_a_quantized_checkpoint_is_not_quantized_again() -> None:
    awq = PackedIntegers(bits=4, group_size=128, symmetric=False, packing=Packing.AWQ)
    stored = Quantization(method="AWQ", default=awq)
    assert choose_quantization("auto", stored) is stored
    message = r"--quantization fp8 .* \(AWQ: 4-bit integers, groups of 128\): leave the option out"
    with pytest.raises(ConfigError, match=message):
        choose_quantization("fp8", stored)


@pytest.mark.parametrize(
    ("option", "description"),
    [
        ("fp8", "Online: FP8, a scale for each channel"),
        ("int8", "Online: INT8, a scale for each channel"),
        ("w4a16", "Online: 4-bit integers, groups of 128"),
    ],
)
def test_all_linear_layers_but_the_head_are_quantized(option: str, description: str) -> None:
    found = choose_quantization(option, Quantization(method=""))
    assert found.describe() == description
    assert found.find_scheme("model.layers.0.mlp.down_proj") == ONLINE_SCHEMES[option]
    assert found.find_scheme("lm_head") == Unquantized()
