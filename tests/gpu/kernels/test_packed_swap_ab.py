# SPDX-License-Identifier: Apache-2.0
"""Swap-AB GEMMs over packed weights equal products in float64, up to their stated rounding errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gemm_kit import check_replays, normal

from mizzen.kernels.gemm.fragments import pack_weight
from mizzen.kernels.gemm.packed_swap_ab import (
    TO_WEIGHTS,
    KernelPlan,
    PackedTileConfig,
    divide_batch,
    find_traits,
    packed_swap_ab_gemm,
    plan_kernel,
    supports,
)
from mizzen.layers.quantized.canonical import Codes, QuantizedWeight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
BATCHES = (8, 16, 17, 32, 50, 64, 96, 100, 128, 160, 192, 256)
CONFIGS = (
    PackedTileConfig(64, 1, 1),
    PackedTileConfig(64, 2, 2, 2),
    PackedTileConfig(64, 1, 4),
    PackedTileConfig(128, 1, 2),
    PackedTileConfig(128, 3, 1),
    PackedTileConfig(128, 2, 1, 2),
    PackedTileConfig(192, 1, 1),
    PackedTileConfig(192, 4, 2),
    PackedTileConfig(192, 6, 1),
)
KERNEL_CODES = tuple(codes for codes in Codes if codes is not Codes.E2M1)
"""Codes that the kernels multiply; E2M1 only occurs in experts, which have kernels of their own."""
SUM_ERROR = 2**-14
"""Bound of the error of float32 sums, relative to the sum of the products' magnitudes."""


def random_weight(
    rows: int,
    columns: int,
    codes: Codes,
    *,
    group: int = 128,
    row_step: int = 1,
    zeros: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> QuantizedWeight:
    """Return a weight of random codes (for E4M3 subnormal numbers as well) with scales around 2^-8."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device="cuda")

    values = integers(0, 256, rows, columns // 2 if codes is Codes.UINT4 else columns).to(torch.uint8)
    if codes is Codes.E4M3:
        values[(values & 0x7F) == 0x7F] = 1  # neither NaN, but the smallest subnormal number
        values = values.view(torch.float8_e4m3fn)
    elif codes is Codes.INT8:
        values = values.view(torch.int8)
    shape = -(-rows // row_step), -(-columns // group)
    scales = (torch.rand(shape, generator=generator, device="cuda") + 0.5) / (1 << 8)
    largest = 16 if codes is Codes.UINT4 else 256
    return QuantizedWeight(
        codes=codes,
        values=values,
        scales=scales.to(dtype),
        row_step=row_step,
        column_step=group,
        zeros=integers(0, largest, *shape).to(torch.uint8) if zeros else None,
    )


def suits(weight: QuantizedWeight, count: int, config: PackedTileConfig) -> bool:
    """Return whether a tile config is valid for a weight and `count` rows of x."""
    return KernelPlan(find_traits(pack_weight(weight)), config, divide_batch(count)).is_valid


def check_product(
    weight: QuantizedWeight, count: int, config: PackedTileConfig | None = None, *, swiglu: bool = False
) -> None:
    """Check the products of a weight with random x, element by element."""
    packed = pack_weight(weight, swiglu=swiglu)
    x = normal(count, weight.columns, seed=count)
    plan = plan_kernel(find_traits(packed), weight.rows, count, config)
    out = torch.full((count, weight.rows // (1 + swiglu)), float("nan"), dtype=torch.bfloat16, device="cuda")
    assert packed_swap_ab_gemm(packed, x, out, swiglu=swiglu, config=config) is out
    w = weight.dequantize().double()
    exact = x.double() @ w.T
    weight_error = 0.0
    if plan.scaling == TO_WEIGHTS:
        weight_error = 2**-9 if weight.scales.dtype == torch.bfloat16 else 2**-8
    error = (x.double().abs() @ w.abs().T) * (SUM_ERROR + weight_error)
    if swiglu:
        exact, error = swiglu_bounds(exact, error)
    excess = (out.double() - exact).abs() - error - exact.abs() * 2**-8
    assert excess.max() <= 0, (
        f"{plan}: error {(out.double() - exact).abs().max():.3g}, excess {excess.max():.3g}"
    )


def swiglu_bounds(sums: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return silu(gate) * up and the bound of its error; the kernel rounds gate and up to bfloat16 first."""
    error = error + sums.abs() * 2**-8
    (gate, up), (gate_error, up_error) = sums.chunk(2, -1), error.chunk(2, -1)
    # The slope of silu is at most 1.1; the last term is that of the fast exponential function.
    bound = 1.1 * gate_error * (up.abs() + up_error) + F.silu(gate).abs() * up_error
    return F.silu(gate) * up, bound + (F.silu(gate) * up).abs() * 2**-12 + 1e-6


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("codes", KERNEL_CODES)
def test_products_equal_exact_products_with_every_tile_config(codes: Codes, config: PackedTileConfig) -> None:
    weight = random_weight(1040, 1664, codes, zeros=codes in (Codes.UINT4, Codes.UINT8))
    for count in (16, 50, 128, 250):
        if suits(weight, count, config):
            check_product(weight, count, config)


@pytest.mark.parametrize("group", [32, 64, 128, 192, 256, 4096])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("codes", [Codes.UINT4, Codes.UINT8])
def test_groups_may_have_any_supported_size(codes: Codes, zeros: bool, group: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight = random_weight(256, 1088, codes, group=min(group, 1088), zeros=zeros, dtype=dtype)
        for count in (16, 128):
            check_product(weight, count)
            check_product(weight, count, PackedTileConfig(192, 2, 1))


@pytest.mark.parametrize("count", BATCHES)
@pytest.mark.parametrize(("rows", "columns"), [(4096, 4096), (6144, 2048), (64, 12288), (200, 136)])
def test_default_tile_configs_suit_all_batches(rows: int, columns: int, count: int) -> None:
    check_product(random_weight(rows, columns, Codes.UINT4, group=64), count)
    check_product(random_weight(rows, columns, Codes.E4M3, group=columns, dtype=torch.float32), count)


@pytest.mark.parametrize("count", [16, 80, 200])
@pytest.mark.parametrize("config", [None, PackedTileConfig(128, 2, 1), PackedTileConfig(192, 1, 2)], ids=str)
def test_blocks_of_rows_share_their_scales(config: PackedTileConfig | None, count: int) -> None:
    weight = random_weight(1152, 1152, Codes.E4M3, row_step=128, dtype=torch.float32)
    if config is None or suits(weight, count, config):
        check_product(weight, count, config)
    check_product(weight, count, swiglu=True)


@pytest.mark.parametrize("config", [None, *CONFIGS], ids=str)
def test_swiglu_follows_the_product(config: PackedTileConfig | None) -> None:
    for codes in (Codes.UINT4, Codes.INT8):
        weight = random_weight(2080, 512, codes)
        weight.scales /= 16
        for count in (32, 128, 192):
            if config is None or suits(weight, count, config):
                check_product(weight, count, config, swiglu=True)


def test_extreme_codes_are_exact() -> None:
    lows = {Codes.UINT4: 0x00, Codes.UINT8: 0, Codes.INT8: 0x80, Codes.E4M3: 0xFE}
    highs = {Codes.UINT4: 0xFF, Codes.UINT8: 255, Codes.INT8: 0x7F, Codes.E4M3: 0x01}
    for codes in KERNEL_CODES:
        for extremes in (lows, highs):
            weight = random_weight(128, 512, codes)
            weight.values.view(torch.uint8).fill_(extremes[codes])
            weight.scales.fill_(1)
            x = torch.zeros(16, 512, dtype=torch.bfloat16, device="cuda")
            x[:, 77] = 1
            expected = weight.dequantize()[:, 77].expand(16, -1).to(torch.bfloat16)
            assert torch.equal(packed_swap_ab_gemm(pack_weight(weight), x), expected)


@pytest.mark.parametrize("count", [40, 200])
def test_rows_do_not_depend_on_other_rows(count: int) -> None:
    packed = pack_weight(random_weight(1024, 2048, Codes.UINT4, zeros=True))
    x = normal(count, 2048)
    expected = packed_swap_ab_gemm(packed, x)
    others = torch.full_like(x, float("nan"))
    others[[3, count - 1]] = x[[3, count - 1]]
    actual = packed_swap_ab_gemm(packed, others)
    assert torch.equal(actual[[3, count - 1]], expected[[3, count - 1]])


@pytest.mark.parametrize("defer_pdl", [False, True])
@pytest.mark.parametrize("config", [None, PackedTileConfig(64, 4, 1), PackedTileConfig(128, 2, 2)], ids=str)
def test_a_chain_of_overlapping_products_is_reproducible(
    config: PackedTileConfig | None, defer_pdl: bool
) -> None:
    weights = [random_weight(2048, 2048, Codes.UINT4, seed=i) for i in range(20)]
    for weight in weights:
        weight.scales *= 1.2
    packed = [pack_weight(weight) for weight in weights]
    x = normal(64, 2048)
    out = torch.empty_like(x)

    def chain() -> None:
        y = x
        for weight in packed:
            y = packed_swap_ab_gemm(weight, y, defer_pdl=defer_pdl, config=config)
        out.copy_(y)

    actual, exact = check_replays(chain, out, 100), x.double()
    for weight in weights:
        exact = exact @ weight.dequantize().double().T
    assert (actual.double() - exact).norm() < 0.05 * exact.norm()


def test_unsupported_weights_and_inputs_are_errors() -> None:
    packed = pack_weight(random_weight(128, 256, Codes.UINT4))
    with pytest.raises(ValueError, match="columns, but"):
        packed_swap_ab_gemm(packed, normal(16, 128))
    with pytest.raises(ValueError, match="packed with swiglu"):
        packed_swap_ab_gemm(packed, normal(16, 256), swiglu=True)
    with pytest.raises(ValueError, match="another tile config"):
        packed_swap_ab_gemm(packed, normal(16, 256), config=PackedTileConfig(64, 8, 2))
    odd = pack_weight(random_weight(128, 96, Codes.UINT4, group=48))
    assert not supports(odd)
    with pytest.raises(ValueError, match="dequantize"):
        packed_swap_ab_gemm(odd, normal(16, 96))
