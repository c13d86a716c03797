# SPDX-License-Identifier: Apache-2.0
"""Swap-AB GEMMs equal PyTorch's with every tile config, alone and in a chain of overlapping kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gemm_kit import check_chain, close, normal

from mizzen.kernels.gemm.swap_ab import TileConfig, swap_ab_gemm
from mizzen.layers.linear_methods.base import LinearKind, LinearSpec
from mizzen.layers.linear_methods.small_batch import SmallBatchLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
CONFIGS = (
    TileConfig(64, 1, 1),
    TileConfig(64, 1, 4),
    TileConfig(64, 2, 1, blocks_per_sm=2),
    TileConfig(64, 4, 2),
    TileConfig(128, 1, 2),
    TileConfig(128, 2, 4),
    TileConfig(128, 4, 1),
    TileConfig(128, 3, 2),
    TileConfig(192, 1, 2),
    TileConfig(192, 4, 1),
)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_swap_ab_gemms_equal_exact_products(config: TileConfig) -> None:
    for rows, columns in ((16, 256), (1040, 1024), (3072, 4352), (64, 25600)):
        weight = normal(rows, columns) / columns**0.5
        for batch in (16, 48, 128, 176, 256):
            if config.supports(rows, columns, batch):
                compare(weight, batch, config)


@pytest.mark.parametrize("split", [2, 3, 5, 6, 7])
def test_k_splits_may_have_unequal_lengths(split: int) -> None:
    for columns in (64 * (2 * split + 1), 64 * (7 * split - 1)):
        config = TileConfig(64, split, 1)
        assert config.supports(208, columns, 80)
        compare(normal(208, columns) / columns**0.5, 80, config)


def test_deferred_pdl_does_not_change_the_result() -> None:
    weight, x = normal(1040, 1024) / 32, normal(40, 1024, seed=1)
    assert torch.equal(swap_ab_gemm(weight, x, defer_pdl=True), swap_ab_gemm(weight, x))
    check_chain(lambda weight, y: swap_ab_gemm(weight, y, defer_pdl=True), 2048, 30, 40)


def compare(weight: torch.Tensor, batch: int, config: TileConfig) -> None:
    rows, columns = weight.shape
    for count in (batch, batch - 5):
        x = normal(count, columns, seed=count)
        out = torch.full((count, rows), float("nan"), dtype=torch.bfloat16, device="cuda")
        expected = x.double() @ weight.double().T
        close(swap_ab_gemm(weight, x, config=config), expected)
        close(swap_ab_gemm(weight, x, out, config=config), expected)
        if batch in (48, 256):
            bias, out = normal(rows, seed=5), torch.full_like(out, float("nan"))
            close(swap_ab_gemm(weight, x, out, bias=bias, config=config), expected + bias.double())
        if config.multicast == 1 or batch == 256:  # every config is compiled
            gate, other = expected.chunk(2, -1)
            close(swap_ab_gemm(weight, x, swiglu=True, config=config), F.silu(gate) * other)


@pytest.mark.parametrize(
    ("count", "config"), [(20, None), (64, TileConfig(64, 4, 1)), (100, TileConfig(128, 2, 2))], ids=str
)
def test_a_chain_of_overlapping_gemms_is_reproducible(count: int, config: TileConfig | None) -> None:
    check_chain(lambda weight, y: swap_ab_gemm(weight, y, config=config), 2048, 30, count)


@pytest.mark.parametrize("count", [1, 3, 20, 48, 100])
@pytest.mark.parametrize(("rows", "columns"), [(5120, 2880), (2880, 4096)])
def test_layers_with_biases_equal_exact_products(rows: int, columns: int, count: int) -> None:
    kind = LinearKind.COLUMN if rows > columns else LinearKind.ROW
    spec = LinearSpec(
        parts=(),
        rows=rows,
        columns=columns,
        bias=True,
        kind=kind,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )
    method = SmallBatchLinear(spec)
    assert method.bias is not None and method.max_batch == (48 if kind is LinearKind.COLUMN else 192)
    method.weight.copy_(normal(rows, columns) / columns**0.5)
    method.bias.copy_(normal(rows, seed=5))
    x = normal(count, columns, seed=count)
    out = torch.full((count, rows), float("nan"), dtype=torch.bfloat16, device="cuda")
    expected = x.double() @ method.weight.double().T + method.bias.double()
    close(method.apply(x), expected)
    close(method.apply(x, out), expected)


def test_unsupported_shapes_are_errors() -> None:
    with pytest.raises(ValueError, match="no tile config"):
        swap_ab_gemm(normal(64, 96), normal(4, 96))
    with pytest.raises(ValueError, match="no tile config"):
        swap_ab_gemm(normal(64, 128), normal(257, 128))
    with pytest.raises(ValueError, match="cannot have a bias"):
        swap_ab_gemm(normal(64, 128), normal(20, 128), swiglu=True, bias=normal(64))
