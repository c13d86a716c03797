# SPDX-License-Identifier: Apache-2.0
"""Quantized inputs equal the reference's, and packed weights are restored exactly."""

from __future__ import annotations

import pytest
import torch
from gemm_kit import normal
from hopper import on_hopper

from rounded_activations import round_activations, round_static

pytestmark = on_hopper("triton", "Triton")
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
KINDS = {E4M3: "e4m3", INT8: "int8"}


def restore(inputs) -> torch.Tensor:
    """Return quantized inputs as float32 [tokens, columns] on the CPU."""
    values, scales = inputs.values.float().cpu(), inputs.scales.cpu()
    if scales.dim() == 1:
        return values * (scales if len(scales) == 1 else scales[:, None])
    return values * scales.t()[: len(values)].repeat_interleave(128, 1)[:, : values.shape[1]]


def check_equal_but_for_ties(actual: torch.Tensor, expected: torch.Tensor, spacing: float) -> None:
    """Check that values are equal, but for a few that lie next to a tie and were rounded to the other code.

    `spacing` is the distance of neighbouring codes relative to the largest absolute value of the row.
    """
    different = (actual - expected).abs() > 1e-5 * expected.abs()
    assert different.float().mean() < 2e-3
    largest = expected.abs().amax(1, keepdim=True).expand_as(expected)[different]
    assert ((actual - expected).abs()[different] <= spacing * largest * 1.01).all()


@pytest.mark.parametrize("dtype", [E4M3, INT8])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 4096), (5, 12288), (300, 1040), (17, 128)])
def test_token_scales_equal_the_reference(dtype: torch.dtype, tokens: int, columns: int) -> None:
    from mizzen.kernels.quantization.inputs import InputFormat, quantize_inputs

    x = normal(tokens, columns) * torch.logspace(-6, 4, tokens, device="cuda")[:, None].bfloat16()
    x[tokens // 2] = 0 if tokens > 1 else x[0]
    actual = restore(quantize_inputs(x, InputFormat(dtype=dtype)))
    expected = torch.from_numpy(round_activations(x.float().cpu().numpy(), KINDS[dtype]))
    check_equal_but_for_ties(actual, expected, 1 / 14 if dtype == E4M3 else 1 / 127)


@pytest.mark.parametrize(("tokens", "columns"), [(1, 4096), (7, 12288), (300, 1152)])
def test_scales_of_columns_equal_the_reference(tokens: int, columns: int) -> None:
    from mizzen.kernels.quantization.inputs import InputFormat, quantize_inputs

    x = normal(tokens, columns) * torch.logspace(-3, 3, columns, device="cuda").bfloat16()
    inputs = quantize_inputs(x, InputFormat(dtype=E4M3, grouped=True))
    assert inputs.scales.shape == (columns // 128, -(-tokens // 4) * 4)
    expected = torch.from_numpy(round_activations(x.float().cpu().numpy(), "e4m3", group=128))
    check_equal_but_for_ties(restore(inputs), expected, 1 / 14)


def test_an_incomplete_group_of_columns_has_its_own_scale() -> None:
    from mizzen.kernels.quantization.inputs import InputFormat, quantize_inputs

    x = normal(6, 1040)
    x[:, 1024:] *= 100
    actual = restore(quantize_inputs(x, InputFormat(dtype=E4M3, grouped=True)))
    whole = torch.nn.functional.pad(x, (0, 112)).float().cpu().numpy()
    expected = torch.from_numpy(round_activations(whole, "e4m3", group=128))[:, :1040]
    check_equal_but_for_ties(actual, expected, 1 / 14)


@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_static_scales_saturate(dtype: torch.dtype) -> None:
    from mizzen.kernels.quantization.inputs import InputFormat, quantize_inputs

    x, scale = normal(9, 2064) * 3, torch.tensor([0.0123], device="cuda")
    if dtype == E4M3:
        scale /= 4
    actual = restore(quantize_inputs(x, InputFormat(dtype=dtype, static_scale=scale)))
    expected = torch.from_numpy(round_static(x.float().cpu().numpy(), KINDS[dtype], scale.item()))
    assert (x.float().cpu().abs() > 1.5 * expected.abs().max()).any()
    check_equal_but_for_ties(actual, expected, 1 / 14 if dtype == E4M3 else 1 / 127)


def test_an_upper_bound_limits_the_scales() -> None:
    from mizzen.kernels.quantization.inputs import InputFormat, quantize_inputs

    x = normal(4, 512)
    x[1, 3], x[2, 5] = 3000, -3000
    inputs = quantize_inputs(x, InputFormat(dtype=E4M3, upper_bound=1200.0))
    assert torch.allclose(inputs.scales[1:3].cpu(), torch.full((2,), 1200 / 448))
    restored = restore(inputs)
    assert restored[1, 3] == pytest.approx(1200) and restored[2, 5] == pytest.approx(-1200)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("grouped", "static"), [(False, False), (True, False), (False, True)])
def test_the_fused_norm_gives_the_codes_of_separate_kernels(add: bool, grouped: bool, static: bool) -> None:
    from mizzen.kernels.norm import add_rms_norm, rms_norm
    from mizzen.kernels.quantization.inputs import InputFormat, quantize_after_norm, quantize_inputs

    scale = torch.tensor([0.01], device="cuda") if static else None
    form = InputFormat(dtype=E4M3, grouped=grouped, static_scale=scale)
    for tokens, size in ((1, 4096), (33, 5120), (3, 896)):
        x, residual, weight = normal(tokens, size), normal(tokens, size, seed=1), normal(size, seed=2)
        other = residual.clone()
        normed = add_rms_norm(x, other, weight, 1e-6) if add else rms_norm(x, weight, 1e-6)
        expected = quantize_inputs(normed, form)
        actual = quantize_after_norm(x, residual if add else None, weight, 1e-6, form)
        assert torch.equal(residual, other)
        check_equal_but_for_ties(restore(actual), restore(expected), 1 / 14)
        assert torch.allclose(actual.scales[..., :tokens], expected.scales[..., :tokens], rtol=1e-2)


@pytest.mark.parametrize("dtype", [E4M3, INT8])
@pytest.mark.parametrize(("grouped", "static"), [(False, False), (True, False), (False, True)])
def test_fused_swiglu_gives_the_codes_of_separate_kernels(
    dtype: torch.dtype, grouped: bool, static: bool
) -> None:
    from mizzen.kernels.quantization.inputs import InputFormat, quantize_inputs
    from mizzen.kernels.swiglu import gate_mul

    if grouped and dtype == INT8:
        pytest.skip("INT8 inputs have a scale for each token or a static one")
    scale = torch.tensor([0.01], device="cuda") if static else None
    form = InputFormat(dtype=dtype, grouped=grouped, static_scale=scale)
    for tokens, size in ((1, 12288), (33, 3072), (300, 1152)):
        gate_up = normal(tokens, 2 * size)
        expected, actual = (
            quantize_inputs(gate_mul(gate_up), form),
            quantize_inputs(gate_up, form, swiglu=True),
        )
        check_equal_but_for_ties(restore(actual), restore(expected), 1 / 14)
        assert torch.allclose(actual.scales[..., :tokens], expected.scales[..., :tokens], rtol=1e-2)


def test_columns_are_gathered() -> None:
    from mizzen.kernels.quantization.gather import gather_columns

    x = normal(5, 3000)[:, 100:2500]
    order = torch.randint(2400, (2560,), device="cuda", dtype=torch.int32)
    assert torch.equal(gather_columns(x, order), x[:, order.long()])


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize(
    ("codes", "row_step", "column_step", "zeros", "scale_dtype"),
    [
        ("uint4", 1, 128, True, torch.float16),
        ("uint4", 1, 32, False, torch.bfloat16),
        ("uint4", 1, 0, True, torch.float32),
        ("uint8", 1, 64, True, torch.float32),
        ("int8", 1, 0, False, torch.bfloat16),
        ("int8", 1, 128, False, torch.bfloat16),
        ("e4m3", 128, 128, False, torch.float32),
        ("e4m3", 1, 0, False, torch.bfloat16),
        ("e4m3", 1000, 0, False, torch.float32),
    ],
)
def test_packed_weights_are_restored_exactly(
    codes: str, row_step: int, column_step: int, zeros: bool, scale_dtype: torch.dtype, swiglu: bool
) -> None:
    from packed_weights import make_weight

    from mizzen.kernels.gemm.fragments import pack_weight
    from mizzen.kernels.quantization.dequantize_packed import (
        dequantize_packed,
        rows_of_strips,
        supports,
    )

    for rows, columns in ((64, 64), (208, 1088), (1040, 416)):
        weight = make_weight(codes, rows, columns, row_step, column_step, zeros=zeros, dtype=scale_dtype)
        packed, expected = pack_weight(weight, swiglu=swiglu), weight.dequantize().bfloat16()
        assert supports(packed)
        out = torch.full((rows, columns), float("nan"), dtype=torch.bfloat16, device="cuda")
        dequantize_packed(packed, out)
        assert torch.equal(out, expected)
        for first in range(0, packed.strips, 3):
            stop = min(first + 3, packed.strips)
            size = rows_of_strips(packed, first, stop)
            part = torch.full((size, columns), float("nan"), dtype=torch.bfloat16, device="cuda")
            dequantize_packed(packed, part, first, stop)
            if swiglu:
                pairs = slice(first * 32, first * 32 + size // 2)
                wanted = torch.cat([half[pairs] for half in expected.chunk(2)])
            else:
                wanted = expected[first * 64 : first * 64 + size]
            assert torch.equal(part, wanted)
