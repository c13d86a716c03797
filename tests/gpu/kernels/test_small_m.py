# SPDX-License-Identifier: Apache-2.0
"""Small-M GEMMs equal PyTorch's with every tile config, alone and in a chain of overlapping kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gemm_kit import check_chain, close, normal

from mizzen.kernels.gemm.small_m import SmallMTileConfig, small_m_gemm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9,
        reason="needs a Hopper GPU",
    ),
]


@pytest.mark.parametrize(
    "config",
    [None, SmallMTileConfig(1, 4), SmallMTileConfig(2, 3), SmallMTileConfig(2, 8), SmallMTileConfig(4, 2)],
    ids=str,
)
@pytest.mark.parametrize("columns", [32, 1024, 3072, 4128, 25600])
@pytest.mark.parametrize("rows", [24, 4096])
def test_small_m_gemms_equal_exact_products(rows: int, columns: int, config: SmallMTileConfig | None) -> None:
    weight = normal(rows, columns) / columns**0.5
    for count in (1, 2, 8, 9, 16, 17, 32):
        x = normal(count, columns, seed=count)
        out = torch.full((count, rows), float("nan"), dtype=torch.bfloat16, device="cuda")
        expected = x.double() @ weight.double().T
        close(small_m_gemm(weight, x, config=config), expected)
        close(small_m_gemm(weight, x, out, config=config), expected)
        bias, out = normal(rows, seed=5), torch.full_like(out, float("nan"))
        close(small_m_gemm(weight, x, out, bias=bias, config=config), expected + bias.double())
        if config is None or config.tiles > 1:
            gate, up = expected.chunk(2, -1)
            close(small_m_gemm(weight, x, swiglu=True, config=config), F.silu(gate) * up)


def test_swiglu_excludes_a_bias() -> None:
    with pytest.raises(ValueError, match="cannot have a bias"):
        small_m_gemm(normal(16, 64), normal(2, 64), swiglu=True, bias=normal(16))


@pytest.mark.parametrize("count", [3, 16, 30])
def test_a_chain_of_overlapping_gemms_is_reproducible(count: int) -> None:
    check_chain(small_m_gemm, 1024, 40, count)
