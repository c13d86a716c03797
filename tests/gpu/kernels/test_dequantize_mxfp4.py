# SPDX-License-Identifier: Apache-2.0
"""The kernel that restores experts in MXFP4 equals the dequantization of PyTorch operations."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, RUNS_TRITON

from mizzen.kernels.quantization.dequantize_mxfp4 import dequantize_mxfp4
from mizzen.layers.quantized.canonical import Codes, QuantizedWeight

pytestmark = RUNS_TRITON


def make_weight(experts: int, rows: int, columns: int, step: int) -> QuantizedWeight:
    """Return random codes with scales from 2 ** -125 to 2 ** 72; smaller ones need not be exact."""
    generator = torch.Generator().manual_seed(columns)
    shape, steps = (experts * rows, columns // 2), -(-columns // step)
    values = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    exponents = torch.randint(2, 200, (shape[0], steps), dtype=torch.uint8, generator=generator)
    return QuantizedWeight(
        codes=Codes.E2M1, values=values.to(DEVICE), scales=exponents.to(DEVICE), column_step=step
    )


@pytest.mark.parametrize(
    ("experts", "rows", "columns", "step"), [(4, 40, 288, 32), (3, 64, 360, 8), (2, 6, 720, 16)]
)
def test_experts_with_tokens_are_restored_exactly(experts: int, rows: int, columns: int, step: int) -> None:
    weight = make_weight(experts, rows, columns, step)
    expected = weight.dequantize().to(torch.bfloat16).view(experts, rows, columns)
    counts = torch.tensor([3, 0, 1, 2][:experts], dtype=torch.int32, device=DEVICE)
    found = dequantize_mxfp4(weight, rows, counts.cumsum(0, dtype=torch.int32))
    for expert, count in enumerate(counts.tolist()):
        if count:
            assert torch.equal(found[expert], expected[expert])


def test_experts_with_the_smallest_scales_are_almost_zero() -> None:
    weight = make_weight(1, 8, 64, 32)
    weight.scales.copy_(torch.arange(16).view(8, 2) % 2)
    found = dequantize_mxfp4(weight, 8, torch.ones(1, dtype=torch.int32, device=DEVICE))
    assert found.abs().max() < 1e-36
