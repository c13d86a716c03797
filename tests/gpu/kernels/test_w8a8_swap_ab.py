# SPDX-License-Identifier: Apache-2.0
"""W8A8 swap-AB GEMMs equal exact products of the dequantized operands, with every tiling and scale."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from gemm_kit import check_replays, close, normal
from hopper import on_hopper
from packed_weights import make_weight

pytestmark = on_hopper("triton", "Triton")
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
TILES = (
    (1, 1, 1, 1),
    (1, 1, 1, 3),
    (1, 1, 4, 1),
    (1, 2, 1, 2),
    (1, 4, 2, 1),
    (1, 3, 1, 2),
    (2, 1, 2, 1),
    (2, 2, 4, 1),
    (2, 4, 1, 1),
    (2, 1, 1, 2),
    (3, 1, 1, 1),
    (3, 2, 2, 1),
)


def make_operands(int8: bool, rows: int, columns: int, count: int, row_step: int = 1, group: int = 0):
    """Return a weight, inputs, and their exact product as float64 [count, rows]."""
    from mizzen.kernels.gemm.w8a8_swap_ab import W8A8Weight
    from mizzen.kernels.quantization.inputs import InputFormat, quantize_inputs

    canonical = make_weight("int8" if int8 else "e4m3", rows, columns, row_step, group)
    weight = W8A8Weight(values=canonical.values, scales=canonical.scales, row_step=row_step)
    x = normal(count, columns, seed=count) * torch.logspace(-2, 2, columns, device="cuda").bfloat16()
    inputs = quantize_inputs(x, InputFormat(dtype=INT8 if int8 else E4M3, grouped=group > 0))
    restored = inputs.values.double()
    if group:
        restored *= inputs.scales.t()[:count].repeat_interleave(128, 1)[:, :columns].double()
    else:
        restored *= inputs.scales[:, None].double()
    return weight, inputs, restored @ canonical.dequantize().double().T


@pytest.mark.parametrize("numbers", TILES, ids=str)
def test_products_are_exact_but_for_rounding(numbers: tuple[int, int, int, int]) -> None:
    from mizzen.kernels.gemm.w8a8_swap_ab import W8A8Tile

    tile = W8A8Tile(*numbers)
    for rows, columns in ((16, 256), (1040, 1040), (3072, 4352)):
        for batch in (8, 16, 48, 112, 128, 192, 256):
            for int8, row_step, group in ((False, 1, 0), (False, 128, 128), (False, 16, 128), (True, 1, 0)):
                if tile.supports(columns, batch, group > 0) and columns // 128 >= 2 * tile.split_k:
                    compare(tile, rows, columns, batch, int8, row_step, group)


def compare(tile, rows: int, columns: int, batch: int, int8: bool, row_step: int, group: int) -> None:
    from mizzen.kernels.gemm.w8a8_swap_ab import w8a8_swap_ab_gemm

    for count in (batch, batch - 5):
        weight, inputs, expected = make_operands(int8, rows, columns, count, row_step, group)
        out = torch.full((count, rows), float("nan"), dtype=torch.bfloat16, device="cuda")
        close(w8a8_swap_ab_gemm(weight, inputs, out, tile=tile), expected)
        if batch in (16, 128, 256):
            gate, up = expected.chunk(2, -1)
            close(w8a8_swap_ab_gemm(weight, inputs, swiglu=True, tile=tile), F.silu(gate) * up)


@pytest.mark.parametrize("count", [1, 2, 8, 9, 40, 130, 200, 256])
@pytest.mark.parametrize(("rows", "columns"), [(1024, 1024), (4096, 12288), (6144, 4096)])
def test_default_tilings_with_a_bias_and_static_scales(rows: int, columns: int, count: int) -> None:
    from mizzen.kernels.gemm.w8a8_swap_ab import QuantizedInputs, W8A8Weight, supports, w8a8_swap_ab_gemm

    for int8 in (False, True):
        weight, inputs, _ = make_operands(int8, rows, columns, count)
        assert supports(weight.values, grouped=False, swiglu=True)
        bias = torch.randn(rows, device="cuda")
        static = QuantizedInputs(values=inputs.values, scales=torch.tensor([0.02], device="cuda"))
        biased = W8A8Weight(values=weight.values, scales=weight.scales, bias=bias)
        product = (static.values.double() * 0.02) @ (weight.values.double() * weight.scales).T
        close(w8a8_swap_ab_gemm(biased, static), product + bias)
        deferred = w8a8_swap_ab_gemm(biased, static, defer_pdl=True)
        assert torch.equal(deferred, w8a8_swap_ab_gemm(biased, static))


@pytest.mark.parametrize("count", [3, 40, 130])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_chain_of_overlapping_kernels_is_reproducible(count: int, grouped: bool) -> None:
    from mizzen.kernels.gemm.w8a8_swap_ab import W8A8Weight, w8a8_swap_ab_gemm
    from mizzen.kernels.quantization.inputs import InputFormat, quantize_inputs

    weights = []
    for seed in range(20):
        step = 128 if grouped else 1
        made = make_weight("e4m3", 2048, 2048, step, 128 if grouped else 0, seed=seed)
        weights.append(W8A8Weight(values=made.values, scales=made.scales, row_step=step))
    x = normal(count, 2048)
    out = torch.empty_like(x)

    def chain() -> None:
        y = x
        for weight in weights:
            y = w8a8_swap_ab_gemm(weight, quantize_inputs(y, InputFormat(dtype=E4M3, grouped=grouped)))
        out.copy_(y)

    assert check_replays(chain, out, 100).float().abs().sum() > 0


def test_unsupported_shapes_are_errors() -> None:
    from mizzen.kernels.gemm.w8a8_swap_ab import supports, w8a8_swap_ab_gemm

    weight, inputs, _ = make_operands(False, 64, 256, 257)
    with pytest.raises(ValueError, match="no tiling"):
        w8a8_swap_ab_gemm(weight, inputs)
    assert not supports(torch.zeros(64, 40, dtype=INT8), grouped=False)
    assert not supports(torch.zeros(64, 256, dtype=INT8), grouped=True)


@pytest.mark.parametrize("count", [97, 130, 257, 1026])
@pytest.mark.parametrize(("rows", "columns"), [(1024, 768), (4096, 4096), (6144, 2048)])
@pytest.mark.parametrize("kind", ["channels", "blocks", "int8"])
def test_products_of_libraries_are_exact_but_for_rounding(
    kind: str, rows: int, columns: int, count: int
) -> None:
    from mizzen.kernels.quantization.inputs import InputFormat
    from mizzen.layers.linear_methods.w8a8 import Operands, library_gemm

    int8, step = kind == "int8", 128 if kind == "blocks" else 1
    weight, inputs, expected = make_operands(int8, rows, columns, count, step, 128 if step > 1 else 0)
    bias = normal(rows) / 10
    for added in (None, bias):
        weight = replace(weight, bias=None if added is None else added.float())
        format = InputFormat(dtype=inputs.values.dtype, grouped=step > 1)
        out = library_gemm(
            Operands(weight=weight, inputs=format, library_bias=added, uses_library=True), inputs
        )
        wanted = expected if added is None else expected + added.double()
        assert out.shape == (count, rows) and out.dtype == torch.bfloat16
        assert (out.double() - wanted).norm() < 5e-3 * wanted.norm()
