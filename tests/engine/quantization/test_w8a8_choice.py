# SPDX-License-Identifier: Apache-2.0
"""Layers whose weights and inputs are multiplied in 8 bits on a GPU, their scales, and other devices."""

from __future__ import annotations

import pytest
import torch

from mizzen.layers.linear_methods.base import LinearKind, LinearPart, LinearSpec
from mizzen.layers.linear_methods.dequantized import DequantizedLinear
from mizzen.layers.linear_methods.quantized_gpu import make_quantized_linear
from mizzen.layers.linear_methods.w8a8 import W8A8Linear, is_w8a8
from mizzen.quantization.schemes import (
    Activations,
    ActivationScales,
    Fp8Layout,
    Fp8Weights,
    Int8Weights,
    PackedIntegers,
    Packing,
    ScaleShape,
    WeightScheme,
)
from mizzen.weights.load import fill_dummy

TOKEN = Activations(scales=ActivationScales.TOKEN)
STATIC = Activations(scales=ActivationScales.STATIC)
GROUPS = Activations(scales=ActivationScales.TOKEN_GROUP, group_size=128)
ASYMMETRIC = Activations(scales=ActivationScales.STATIC, symmetric=False)


def make_spec(
    rows: int = 64, columns: int = 256, first_column: int = 0, *, swiglu: bool = False
) -> LinearSpec:
    """Return a layer of one part on the CPU."""
    part = LinearPart(
        name="layer",
        first_row=0,
        rows=slice(0, rows),
        columns=slice(first_column, first_column + columns),
        shape=(rows, 1024),
    )
    return LinearSpec(
        parts=(part,),
        rows=rows,
        columns=columns,
        bias=False,
        kind=LinearKind.COLUMN,
        swiglu=swiglu,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


def fp8(
    shape: ScaleShape, activations: Activations | None, block: tuple[int, int] | None = None
) -> Fp8Weights:
    """Return a scheme of FP8 weights."""
    return Fp8Weights(
        scale_shape=shape, block=block, activations=activations, layout=Fp8Layout.COMPRESSED_TENSORS
    )


CASES: list[tuple[WeightScheme, bool]] = [
    (fp8(ScaleShape.CHANNEL, TOKEN), True),
    (fp8(ScaleShape.TENSOR, STATIC), True),
    (fp8(ScaleShape.CHANNEL, None), False),
    (fp8(ScaleShape.CHANNEL, GROUPS), False),
    (fp8(ScaleShape.BLOCK, GROUPS, (128, 128)), True),
    (fp8(ScaleShape.BLOCK, GROUPS, (32, 64)), False),
    (fp8(ScaleShape.BLOCK, TOKEN, (128, 128)), False),
    (Int8Weights(scale_shape=ScaleShape.CHANNEL, activations=TOKEN), True),
    (Int8Weights(scale_shape=ScaleShape.CHANNEL, activations=ASYMMETRIC), False),
    (Int8Weights(scale_shape=ScaleShape.GROUP, group_size=128, activations=None), False),
    (PackedIntegers(bits=4, group_size=128, symmetric=True, packing=Packing.AWQ), False),
]


@pytest.mark.parametrize(("scheme", "expected"), CASES)
def test_schemes_with_inputs_in_8_bits(scheme: WeightScheme, expected: bool) -> None:
    assert is_w8a8(make_spec(rows=128), scheme) is expected


def test_shapes_that_the_kernels_do_not_support() -> None:
    channel = fp8(ScaleShape.CHANNEL, TOKEN)
    assert not is_w8a8(make_spec(columns=200), channel)
    assert not is_w8a8(make_spec(rows=60), channel)
    assert is_w8a8(make_spec(rows=72), channel)
    assert not is_w8a8(make_spec(rows=72, swiglu=True), channel)
    assert is_w8a8(make_spec(columns=320, first_column=192), channel)


@pytest.mark.parametrize(
    ("rows", "columns", "first_column", "expected"),
    [(128, 256, 256, True), (128, 320, 192, False), (128, 320, 256, False), (192, 256, 0, False)],
)
def test_parts_of_blocks_are_left_to_packed_weights(
    rows: int, columns: int, first_column: int, expected: bool
) -> None:
    """No GEMM in 8 bits multiplies large batches by parts of blocks."""
    spec = make_spec(rows, columns, first_column)
    assert is_w8a8(spec, fp8(ScaleShape.BLOCK, GROUPS, (128, 128))) is expected


def test_weights_on_the_cpu_are_dequantized() -> None:
    assert type(make_quantized_linear(make_spec(), fp8(ScaleShape.CHANNEL, TOKEN))) is DequantizedLinear


BOUNDED = Activations(scales=ActivationScales.TOKEN, upper_bound=1200.0)


@pytest.mark.parametrize(
    "scheme",
    [
        fp8(ScaleShape.TENSOR, STATIC),
        fp8(ScaleShape.CHANNEL, BOUNDED),
        Int8Weights(scale_shape=ScaleShape.CHANNEL, activations=STATIC),
    ],
)
def test_inputs_that_are_divided_keep_their_codes(scheme: Fp8Weights | Int8Weights) -> None:
    """The scale of a KV cache's values divides the inputs of the output projection, which may exceed 448."""
    method = W8A8Linear(make_spec(), scheme)
    with torch.inference_mode():
        fill_dummy(method.targets(), seed=0, progress=lambda done, total: None)
        method.finish()
        before, weight = read_inputs(method), method.weight.dequantize()
        method.absorb_input_factor(2.0**-6)
    scale, bound = read_inputs(method)
    assert (scale, bound) == (before[0] * 64, before[1] * 64)
    assert scale or bound
    assert torch.equal(method.weight.dequantize(), weight / 64)


def read_inputs(method: W8A8Linear) -> tuple[float, float]:
    """Return the static scale of the inputs that the kernels use, 0 for none, and their upper bound."""
    assert method.operands is not None
    form = method.operands.inputs
    return 0.0 if form.static_scale is None else form.static_scale.item(), form.upper_bound
