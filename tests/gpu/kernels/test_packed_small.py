# SPDX-License-Identifier: Apache-2.0
"""GEMMs of up to 16 rows over packed weights are exact, except for rounding in float32 and of the result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gemm_kit import check_replays, close, normal

from mizzen.kernels.gemm.fragments import PackedWeight, pack_weight
from mizzen.kernels.gemm.gemv import PreNorm
from mizzen.kernels.gemm.packed_small import (
    MAX_BATCH,
    format_of,
    kernel_specs,
    max_batch,
    packed_small_gemm,
    supports,
    supports_norm,
)
from mizzen.kernels.gemm.packed_small_tiles import TILE_CONFIGS, SmallTileConfig
from mizzen.kernels.norm import add_rms_norm, rms_norm
from mizzen.layers.quantized.canonical import Codes, QuantizedWeight
from random_weights import make_weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9,
        reason="needs a Hopper GPU",
    ),
]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HALF_ULP = 2.0**-8
"""Largest relative error of a number that is rounded to bfloat16."""
SUM_ERROR = 2.0**-18
"""Largest error of a sum in float32, relative to the sum of the terms' absolute values."""
COUNTS = (1, 2, 7, 8, 9, 16)


def on_gpu(weight: QuantizedWeight) -> QuantizedWeight:
    """Move the tensors of a weight to the GPU, and return it."""
    weight.values, weight.scales = weight.values.cuda(), weight.scales.cuda()
    weight.zeros = None if weight.zeros is None else weight.zeros.cuda()
    return weight


def check(packed: PackedWeight, w: torch.Tensor, count: int, config: SmallTileConfig | None = None) -> None:
    """Compare the product of a packed weight with the exact one of w (float64 [rows, columns])."""
    x = normal(count, packed.columns, seed=count)
    out = torch.full((count, packed.rows // (1 + packed.swiglu)), float("nan"), dtype=BF16, device="cuda")
    packed_small_gemm(packed, x, out, swiglu=packed.swiglu, config=config)
    exact, error = x.double() @ w.T, SUM_ERROR * (x.double().abs() @ w.T.abs())
    if packed.swiglu:
        exact, error = (part.chunk(2, -1) for part in (exact, error + HALF_ULP * exact.abs()))
        (gate, up), (gate_error, up_error) = exact, error
        # The derivative of SiLU is below 1.1, and the kernel's exponential and division are approximate.
        silu = torch.nn.functional.silu(gate)
        silu_error = 1.1 * gate_error + 2.0**-18 * gate.abs()
        exact, error = silu * up, silu_error * (up.abs() + up_error) + silu.abs() * up_error
    error = (error + HALF_ULP * exact.abs()) * 1.001 + 1e-38
    wrong = ~((out.double() - exact).abs() <= error)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} outputs, first at {wrong.nonzero()[0].tolist()}"
    )


FORMATS = [
    (Codes.UINT4, 1, 32, False, BF16),
    (Codes.UINT4, 1, 64, True, F16),
    (Codes.UINT4, 1, 128, False, BF16),
    (Codes.UINT4, 1, 128, True, F16),
    (Codes.UINT4, 1, 128, True, F32),
    (Codes.UINT4, 1, 0, False, BF16),
    (Codes.UINT4, 1, 0, True, F16),
    (Codes.UINT8, 1, 32, True, BF16),
    (Codes.UINT8, 1, 128, True, F16),
    (Codes.UINT8, 1, 0, False, F16),
    (Codes.INT8, 1, 0, False, F32),
    (Codes.INT8, 1, 128, False, BF16),
    (Codes.E4M3, 128, 128, False, F32),
    (Codes.E4M3, 32, 64, False, BF16),
    (Codes.E4M3, 12, 128, False, F32),
    (Codes.E4M3, 1, 0, False, F32),
    (Codes.E4M3, 4096, 0, False, F32),
]
"""Codes, row step, column step (0: all columns), whether there are zero points, and dtype of the scales."""


@pytest.mark.parametrize("swiglu", [False, True], ids=["plain", "swiglu"])
@pytest.mark.parametrize(("codes", "row_step", "column_step", "zeros", "dtype"), FORMATS, ids=str)
def test_products_equal_exact_ones(
    codes: Codes, row_step: int, column_step: int, zeros: bool, dtype: torch.dtype, swiglu: bool
) -> None:
    for rows, columns in [(64, 64), (200, 136), (1024, 2048), (4096, 1088)]:
        weight = on_gpu(make_weight(codes, rows, columns, row_step, column_step, zeros=zeros, dtype=dtype))
        packed = pack_weight(weight, swiglu=swiglu)
        if not supports(packed):
            assert column_step == 32 and columns % 64
            continue
        w = weight.dequantize().double()
        for count in COUNTS:
            check(packed, w, count)


@pytest.mark.parametrize(
    "config",
    [
        SmallTileConfig(4, 1, 1, 8, 2, 2),
        SmallTileConfig(4, 3, 1, 4, 3, 2),
        SmallTileConfig(4, 7, 1, 8, 2, 1),
        SmallTileConfig(4, 1, 2, 8, 1, 4),
        SmallTileConfig(4, 5, 4, 8, 3, 1),
        SmallTileConfig(4, 1, 4, 16, 2, 2),
        SmallTileConfig(2, 3, 1, 8, 2, 4),
        SmallTileConfig(2, 2, 2, 8, 3, 2),
        SmallTileConfig(1, 5, 1, 16, 2, 2),
        SmallTileConfig(2, 5, 1, 4, 2, 2, 2),
        SmallTileConfig(2, 1, 1, 4, 2, 8),
        SmallTileConfig(4, 1, 2, 8, 2, 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("codes", [Codes.UINT4, Codes.E4M3])
def test_products_are_exact_with_every_tiling(codes: Codes, config: SmallTileConfig) -> None:
    row_step, dtype = (1, BF16) if codes is Codes.UINT4 else (128, F32)
    supported = 0
    for rows, columns, swiglu in [(832, 2048, False), (1024, 1024, True), (640, 2304, True)]:
        weight = on_gpu(make_weight(codes, rows, columns, row_step, 128, dtype=dtype))
        packed = pack_weight(weight, swiglu=swiglu)
        for count in (1, 5, 8, 13, 16):
            if config.supports(format_of(packed), count):
                supported += 1
                check(packed, weight.dequantize().double(), count, config)
    assert supported >= 10


ONE_ROW_SHAPES = [shape for *shape, batch in TILE_CONFIGS if shape[0] is Codes.UINT4 and batch == 1]
"""Codes, rows and columns of weights with a measured tiling for one row of x."""


@pytest.mark.parametrize(("codes", "rows", "columns"), ONE_ROW_SHAPES, ids=str)
def test_one_row_is_exact_with_the_measured_tilings(codes: Codes, rows: int, columns: int) -> None:
    weight = on_gpu(make_weight(codes, rows, columns, 1, 128, dtype=BF16))
    check(pack_weight(weight, swiglu=rows > columns * 2), weight.dequantize().double(), 1)


NORM_CASES = [
    (Codes.UINT4, 1, 128, 6144, 4096, False),
    (Codes.UINT4, 1, 128, 24576, 4096, True),
    (Codes.UINT4, 1, 32, 640, 1088, True),
    (Codes.UINT4, 1, 0, 3072, 2560, True),
    (Codes.INT8, 1, 0, 1536, 2048, False),
    (Codes.E4M3, 128, 128, 1024, 1024, True),
]
"""Codes, row step, column step (0: all columns), rows, columns, and whether there is SwiGLU."""


@pytest.mark.parametrize("add", [False, True], ids=["norm", "add and norm"])
@pytest.mark.parametrize(
    ("codes", "row_step", "column_step", "rows", "columns", "swiglu"), NORM_CASES, ids=str
)
def test_a_row_is_added_to_the_residual_and_normalised_first(
    codes: Codes, row_step: int, column_step: int, rows: int, columns: int, swiglu: bool, add: bool
) -> None:
    dtype = BF16 if codes is Codes.UINT4 else F32
    packed = pack_weight(
        on_gpu(make_weight(codes, rows, columns, row_step, column_step, dtype=dtype)), swiglu=swiglu
    )
    assert supports(packed) and supports_norm(packed)
    scale = 1 + normal(columns, seed=1) / 4
    for seed, factor in ((2, 1), (3, 300)):
        x, residual = normal(1, columns, seed=seed) * factor, normal(1, columns, seed=seed + 10)
        norm = PreNorm(scale=scale, epsilon=1e-6, residual=residual if add else None)
        out = torch.full((1, rows // (1 + swiglu)), float("nan"), dtype=BF16, device="cuda")
        new_residual = torch.full_like(residual, float("nan"))
        packed_small_gemm(packed, x, out, swiglu=swiglu, norm=norm, new_residual=new_residual)
        before = residual.clone()
        inputs = add_rms_norm(x, before, scale, 1e-6) if add else rms_norm(x, scale, 1e-6)
        if add:
            assert torch.equal(new_residual, before)
        else:
            assert new_residual.isnan().all()
        separate = packed_small_gemm(packed, inputs, swiglu=swiglu)
        # The norms add up squares in different orders, which may round a few elements differently.
        close(out, separate)
        assert (out == separate).float().mean() > 0.9


def test_a_row_of_the_result_depends_on_its_row_of_x_alone() -> None:
    packed = pack_weight(on_gpu(make_weight(Codes.UINT4, 4096, 4096, 1, 128, dtype=BF16)))
    for count in (2, 8, 16):
        x = normal(count, 4096)
        together = packed_small_gemm(packed, x)
        for row in range(count):
            other = torch.full_like(x, 1e4)
            other[row] = x[row]
            assert torch.equal(packed_small_gemm(packed, other)[row], together[row])


def test_rows_of_x_that_are_not_finite_do_not_spread() -> None:
    packed = pack_weight(on_gpu(make_weight(Codes.E4M3, 200, 136, 1, 0)))
    x = normal(9, 136)
    expected = packed_small_gemm(packed, x)
    x[3] = float("nan")
    out = packed_small_gemm(packed, x)
    assert out[3].isnan().all()
    keep = torch.arange(9, device="cuda") != 3
    assert torch.equal(out[keep], expected[keep])


@pytest.mark.parametrize("count", [1, 3, 16])
@pytest.mark.parametrize("columns", [1024, 4096])
def test_a_chain_of_overlapping_gemms_is_reproducible(columns: int, count: int) -> None:
    """Graph replays of dependent kernels give the same bits, and those of kernels that run one at a time."""
    weights = []
    for seed in range(20):
        weight = on_gpu(make_weight(Codes.UINT4, columns, columns, 1, 128, dtype=BF16))
        weight.scales = (weight.scales.abs() * 0 + 0.25 / columns**0.5 + seed * 1e-5).to(BF16)
        weights.append(pack_weight(weight))
    x = normal(count, columns, seed=99)
    out = torch.empty_like(x)

    def chain() -> None:
        y = x
        for weight in weights:
            y = packed_small_gemm(weight, y)
        out.copy_(y)

    first, y = check_replays(chain, out, 50), x
    for weight in weights:
        y = packed_small_gemm(weight, y)
        torch.cuda.synchronize()
    assert torch.isfinite(first.float()).all() and first.any()
    assert torch.equal(first, y)


@pytest.mark.parametrize("config", [None, SmallTileConfig(4, 3, 1, 4, 3, 2)], ids=str)
@pytest.mark.parametrize("count", [1, 8])
def test_loading_the_next_weight_into_the_cache_changes_no_result(
    count: int, config: SmallTileConfig | None
) -> None:
    first = pack_weight(on_gpu(make_weight(Codes.UINT4, 4096, 2048, 1, 128, dtype=BF16)))
    second = pack_weight(on_gpu(make_weight(Codes.UINT4, 2048, 4096, 1, 128, dtype=BF16)))
    x, values = normal(count, 2048), second.values.view(-1)
    expected = packed_small_gemm(first, x, config=config)
    for size in (16, 16384, 1 << 20, values.numel() - 16, values.numel()):
        before = values.clone()
        out = packed_small_gemm(first, x, config=config, next_weight=values[:size])
        assert torch.equal(out, expected)
        assert torch.equal(packed_small_gemm(second, out), packed_small_gemm(second, expected))
        assert torch.equal(values, before)


def test_a_chain_of_gemms_with_norms_is_reproducible() -> None:
    """The residual stream alternates between new tensors, as in decoder layers."""
    made = [make_weight(Codes.UINT4, 2048, 2048, 1, 128, dtype=BF16) for _ in range(2)]
    weights = [pack_weight(on_gpu(weight)) for weight in made]
    scale = 1 + normal(2048, seed=1) / 4
    x, start = normal(1, 2048, seed=2), normal(1, 2048, seed=3)
    out = torch.empty_like(x)

    def chain() -> None:
        y, residual = x, start
        for layer in range(20):
            new_residual = torch.empty_like(residual)
            norm = PreNorm(scale=scale, epsilon=1e-6, residual=residual)
            y = packed_small_gemm(weights[layer % 2], y, norm=norm, new_residual=new_residual)
            residual = new_residual
        out.copy_(residual)

    first, y, residual = check_replays(chain, out, 50), x, start.clone()
    for layer in range(20):
        y = packed_small_gemm(weights[layer % 2], add_rms_norm(y, residual, scale, 1e-6))
        torch.cuda.synchronize()
    assert (first.double() - residual.double()).norm() < 0.05 * residual.double().norm()


def test_start_up_compiles_every_kernel_that_is_used() -> None:
    packed = pack_weight(on_gpu(make_weight(Codes.UINT4, 256, 512, 1, 128, dtype=BF16)))
    specs = kernel_specs(packed, range(1, 65))
    for count in range(1, MAX_BATCH + 1):
        assert kernel_specs(packed, [count]) <= specs
    assert 1 < len(specs) <= 3
    assert not kernel_specs(packed, [MAX_BATCH + 1])


def test_weights_that_are_packed_otherwise_are_refused() -> None:
    packed = pack_weight(on_gpu(make_weight(Codes.INT8, 128, 128)), swiglu=True)
    with pytest.raises(ValueError, match="packed for True; pack it again"):
        packed_small_gemm(packed, normal(1, 128))
    with pytest.raises(ValueError, match="no tiling supports"):
        packed_small_gemm(packed, normal(1, 128), swiglu=True, config=SmallTileConfig(4, 1, 8, 8, 1, 2))
    grouped = pack_weight(on_gpu(make_weight(Codes.INT8, 128, 192, 1, 96)))
    assert not supports(grouped) and max_batch(grouped) == 0
    assert not supports(replace(packed, columns=100))
