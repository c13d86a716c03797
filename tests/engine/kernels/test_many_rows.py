# SPDX-License-Identifier: Apache-2.0
"""The kernels of many rows per expert compile for Hopper without a GPU, to code with overlapping products."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="this PyTorch comes without CUDA's bindings")
pytest.importorskip("triton", reason="this PyTorch comes without Triton")

from machine_code import disassemble

from mizzen.kernels import nvrtc
from mizzen.kernels.experts import many_rows, sorted_pairs
from mizzen.kernels.experts.gate import Gate
from mizzen.kernels.experts.many_rows import MAX_PAIRS, ManyRowsOperand, ManyRowsTile
from mizzen.layers.experts.coded_kernel_plans import CODED_PLANS
from mizzen.layers.experts.kernel_plans import HOPPER_PLAN
from mizzen.models.block import Activation

HOPPER = (9, 0)
MAX_SHARED_BYTES = 227 * 1024
BF16 = ManyRowsOperand(values=torch.zeros(1))
BLOCKS = ManyRowsOperand(values=torch.zeros(1), scales=torch.zeros(1, 2), row_step=128)
CHANNELS = ManyRowsOperand(values=torch.zeros(1), scales=torch.zeros(1, 1))
BF16_TILES = {variant.tile for _, variant in HOPPER_PLAN.many_rows}
E4M3_TILES = {variant.tile for plan in CODED_PLANS.values() for _, variant in plan.many_rows}
CASES = [
    *((BF16, tile) for tile in sorted(BF16_TILES, key=str)),
    *((weight, tile) for tile in sorted(E4M3_TILES, key=str) for weight in (BLOCKS, CHANNELS)),
]


@pytest.mark.parametrize("gate", [Gate(Activation.SILU), None], ids=["gate-up", "down"])
@pytest.mark.parametrize(("weight", "tile"), CASES)
def test_products_overlap(
    weight: ManyRowsOperand, tile: ManyRowsTile, gate: Gate | None, tmp_path: Path
) -> None:
    spec = many_rows.kernel_spec(tile, weight, gate, biased=False)
    cubin = nvrtc.compile_cubin(*spec, HOPPER)
    usage = disassemble(cubin, tmp_path, "--dump-resource-usage")
    static = int(next(re.finditer(r"SHARED:(\d+)", usage))[1])
    shared = tile.shared_bytes(fp8=weight.fp8, has_gate=gate is not None)
    # A few registers may be spilled outside the loop of products.
    assert static + shared <= MAX_SHARED_BYTES and int(next(re.finditer(r"STACK:(\d+)", usage))[1]) <= 16
    instructions = re.findall(r"\b[HQ]GMMA\.[^;]*;", disassemble(cubin, tmp_path, "--dump-sass"))
    assert instructions
    # The source makes groups of four or eight; where they cannot overlap, the compiler waits after each.
    assert len(instructions) == (4 if weight.fp8 else 8) * sum("gsb0" in each for each in instructions)


@pytest.mark.parametrize("held", [1, 8, 128, sorted_pairs.MAX_EXPERTS])
def test_pairs_of_up_to_1024_experts_can_be_sorted(held: int, tmp_path: Path) -> None:
    for spec, dynamic in zip(
        sorted_pairs.kernel_specs(held), (0, sorted_pairs.shared_bytes(held)), strict=True
    ):
        usage = disassemble(nvrtc.compile_cubin(*spec, HOPPER), tmp_path, "--dump-resource-usage")
        assert all(int(each) + dynamic <= MAX_SHARED_BYTES for each in re.findall(r"SHARED:(\d+)", usage))


@pytest.mark.parametrize("fp8", [False, True])
def test_plans_have_tiles_that_the_kernel_supports(fp8: bool) -> None:
    for tile in E4M3_TILES if fp8 else BF16_TILES:
        assert tile.pairs % 16 == 0 and tile.pairs <= MAX_PAIRS[fp8] and tile.cluster in (1, 2)


def test_columns_must_fill_stages() -> None:
    assert many_rows.supports_columns(2880, 2880, fp8=False)
    assert not many_rows.supports_columns(2880, 2880, fp8=True)
    assert many_rows.supports_columns(2048, 768, fp8=True)
    assert not many_rows.supports_columns(2048, 48, fp8=False)
