# SPDX-License-Identifier: Apache-2.0
"""Swap-AB GEMMs over packed weights: their machine code, their tile configs, and kernels for start-up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="this PyTorch comes without CUDA's bindings")
pytest.importorskip("triton", reason="this PyTorch comes without Triton")

from machine_code import disassemble

from mizzen.kernels import nvrtc
from mizzen.kernels.gemm import packed_swap_ab, packed_tile_configs
from mizzen.kernels.gemm.fragments import PackedWeight, ScaleLayout, pack_weight
from mizzen.kernels.gemm.packed_swap_ab import (
    TO_ROWS,
    TO_SUMS,
    TO_WEIGHTS,
    BatchBlocks,
    KernelPlan,
    PackedTileConfig,
    WeightTraits,
)
from mizzen.layers.quantized.canonical import Codes, QuantizedWeight

UINT4 = WeightTraits(Codes.UINT4, 4096, 128, ScaleLayout.GROUP, torch.float16, True)
SMALL_GROUPS = WeightTraits(Codes.INT8, 4096, 32, ScaleLayout.GROUP, torch.float32, True)
E4M3_ROWS = WeightTraits(Codes.E4M3, 4096, 4096, ScaleLayout.ROW, torch.float32, False)
E4M3_BLOCKS = WeightTraits(Codes.E4M3, 4096, 128, ScaleLayout.OCTET, torch.float32, False)


@pytest.mark.parametrize(
    ("traits", "config", "batch", "scaling"),
    [
        (UINT4, PackedTileConfig(192, 1, 1), 16, TO_SUMS),
        (UINT4, PackedTileConfig(192, 1, 2), 96, TO_SUMS),
        (UINT4, PackedTileConfig(192, 1, 1), 128, TO_WEIGHTS),
        (UINT4, PackedTileConfig(128, 2, 1), 128, TO_SUMS),
        (UINT4, PackedTileConfig(128, 6, 1, 2), 32, TO_SUMS),
        (UINT4, PackedTileConfig(64, 3, 2, 2), 128, TO_SUMS),
        (SMALL_GROUPS, PackedTileConfig(192, 5, 1), 64, TO_SUMS),
        (E4M3_ROWS, PackedTileConfig(192, 1, 1), 128, TO_ROWS),
        (E4M3_BLOCKS, PackedTileConfig(192, 1, 1), 96, TO_SUMS),
        (E4M3_BLOCKS, PackedTileConfig(128, 3, 1), 128, TO_SUMS),
    ],
    ids=lambda value: str(value) if isinstance(value, PackedTileConfig) else "",
)
def test_wgmma_instructions_are_neither_serialized_nor_spill(
    traits: WeightTraits, config: PackedTileConfig, batch: int, scaling: int, tmp_path: Path
) -> None:
    plan = KernelPlan(traits, config, BatchBlocks(batch, 1))
    assert plan.is_valid and plan.scaling == scaling
    cubin = nvrtc.compile_cubin(*plan.spec(swiglu=batch == 96, defer_pdl=False), (9, 0))
    instructions = re.findall(r"HGMMA[^;]*;", disassemble(cubin, tmp_path, "--dump-sass"))
    # A stage has eight k-steps. Only the last wgmma of a substep ends a group; the compiler would end one
    # after each if it had to wait for each.
    assert len(instructions) == 8
    assert sum("gsb0" in instruction for instruction in instructions) == 8 // plan.fragments
    assert "STACK:0 " in disassemble(cubin, tmp_path, "--dump-resource-usage")


def test_measured_tile_configs_suit_their_shapes() -> None:
    for (bits, rows, columns), configs in packed_tile_configs.TILE_CONFIGS.items():
        traits = UINT4 if bits == 4 else E4M3_BLOCKS
        traits = WeightTraits(traits.codes, columns, 128, traits.scale_layout, traits.scale_dtype, bits == 4)
        for batch in range(16, max(configs) + 1, 16):
            plan = packed_swap_ab.plan_kernel(traits, rows, batch, None)
            expected = next(config for size, config in sorted(configs.items()) if size >= batch)
            assert plan.config == PackedTileConfig(*expected)


@pytest.mark.parametrize(
    ("rows", "columns", "batch", "expected"),
    [
        (24576, 2048, 32, (192, 1, 1, 1)),  # 128 tiles: a wave
        (4096, 8192, 128, (192, 5, 1, 1)),  # 110 blocks; clusters of 6 would not all fit
        (64, 256, 16, (64, 1, 1, 2)),  # too few columns for k-splits
    ],
)
def test_default_tile_configs_fill_the_sms(
    rows: int, columns: int, batch: int, expected: tuple[int, int, int, int]
) -> None:
    assert packed_tile_configs.find_tile_numbers(4, rows, columns, batch) == expected


@pytest.mark.parametrize(
    ("count", "expected"), [(1, (16, 1)), (100, (112, 1)), (129, (80, 2)), (256, (128, 2))]
)
def test_rows_of_x_are_divided_evenly_among_blocks(count: int, expected: tuple[int, int]) -> None:
    assert packed_swap_ab.divide_batch(count) == BatchBlocks(*expected)


def packed_weight(rows: int, columns: int, group: int) -> PackedWeight:
    """Return a packed UINT4 weight of zeros."""
    return pack_weight(
        QuantizedWeight(
            codes=Codes.UINT4,
            values=torch.zeros(rows, columns // 2, dtype=torch.uint8),
            scales=torch.ones(rows, -(-columns // group), dtype=torch.bfloat16),
            column_step=group,
        )
    )


def test_products_load_exactly_the_kernels_compiled_at_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: set[tuple[Any, ...]] = set()
    monkeypatch.setattr(packed_swap_ab, "load_kernel", lambda *kernel: loaded.add(kernel[:-1]))
    monkeypatch.setattr(packed_swap_ab, "launch", lambda *launch, **options: None)
    monkeypatch.setattr(packed_swap_ab, "make_tensor_map", lambda *dims: None)
    weight, sizes = packed_weight(512, 1024, 128), (8, 16, 17, 100, 256)
    for size in sizes:
        packed_swap_ab.packed_swap_ab_gemm(weight, torch.empty(size, 1024, dtype=torch.bfloat16))
    assert loaded == packed_swap_ab.kernel_specs(weight, sizes)


@pytest.mark.parametrize(
    ("rows", "columns", "group", "supported"),
    [
        (128, 256, 128, True),
        (128, 256, 32, True),
        (128, 192, 192, True),
        (128, 256, 96, False),
        (100, 256, 64, False),
    ],
)
def test_unsupported_weights_have_no_batch(rows: int, columns: int, group: int, supported: bool) -> None:
    assert packed_swap_ab.max_batch(packed_weight(rows, columns, group)) == (256 if supported else 0)
