# SPDX-License-Identifier: Apache-2.0
"""The fused gate-up SwiGLU GEMM equals PyTorch's GEMM followed by SwiGLU, also in a chain of kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gemm_kit import check_replays, close, normal

from mizzen.kernels.gemm.gate_up_swiglu import gate_up_swiglu
from mizzen.kernels.norm import rms_norm
from mizzen.kernels.swiglu import gate_mul

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
SHAPES = ((16, 320), (6144, 1024), (1040, 384), (5632, 2048), (24576, 4096), (256, 12288), (57344, 320))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gate_up_swiglu_equals_the_library_and_the_exact_result(shape: tuple[int, int]) -> None:
    """The shapes cover partial tiles, partial blocks, several waves, and fewer work items than clusters."""
    rows, columns = shape
    weight = normal(rows, columns) / columns**0.5
    for count in (1, 255, 256, 300, 1023, 4097):
        x = normal(count, columns, seed=count)
        actual = gate_up_swiglu(weight, x)
        gates, ups = (x.double() @ weight.double().T).chunk(2, dim=-1)
        exact = F.silu(gates) * ups
        assert actual.shape == exact.shape
        # Gate, up and their product are rounded: three roundings instead of one.
        assert (actual.double() - exact).norm() < 1e-2 * exact.norm()
        library = gate_mul(F.linear(x, weight))
        assert (actual == library).float().mean() > 0.9


def test_large_gate_values_stay_finite() -> None:
    weight = normal(32, 320)
    for scale in (100, 1e6, 1e17):
        x = normal(512, 320, seed=1) * scale
        expected = gate_mul(F.linear(x, weight))
        actual = gate_up_swiglu(weight, x)
        assert torch.equal(actual.isfinite(), expected.isfinite())
        close(actual.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0))


def test_nothing_is_written_beyond_the_last_row_and_column() -> None:
    weight, x = normal(1040, 320) / 18, normal(700, 320)
    area = torch.full((700 + 300, 520), float("nan"), dtype=torch.bfloat16, device="cuda")
    actual = gate_up_swiglu(weight, x, area[100:800])
    assert actual.isfinite().all()
    assert area[:100].isnan().all() and area[800:].isnan().all()


def test_a_chain_of_overlapping_kernels_is_reproducible() -> None:
    size, count = 1024, 1500
    weights = [normal(2 * size, size, seed=i) / size**0.5 for i in range(6)]
    x, ones = normal(count, size, seed=99), torch.ones(size, dtype=torch.bfloat16, device="cuda")
    out, library = torch.empty_like(x), x

    def chain() -> None:
        y = x
        for weight in weights:
            y = rms_norm(gate_up_swiglu(weight, y), ones, 1e-6)
        out.copy_(y)

    actual = check_replays(chain, out, 50)
    for weight in weights:
        library = rms_norm(gate_mul(F.linear(library, weight)), ones, 1e-6)
    assert (actual.double() - library.double()).norm() < 0.05 * library.double().norm()
