# SPDX-License-Identifier: Apache-2.0
"""Experts by wgmma: order of columns, tilings of the plans, and compiled kernels."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.bindings", reason="this PyTorch comes without CUDA's bindings")
pytest.importorskip("triton", reason="this PyTorch comes without Triton")

from machine_code import disassemble

from mizzen.kernels import nvrtc
from mizzen.kernels.experts import coded_wgmma
from mizzen.kernels.experts.coded_wgmma import (
    PAIR_TILES,
    CodedWgmmaTile,
    inputs_spec,
    kernel_spec,
    padded,
    supports,
)
from mizzen.kernels.experts.gate import Gate
from mizzen.kernels.experts.matrices import ExpertMatrices
from mizzen.layers.experts.coded_kernel_plans import CODED_PLANS
from mizzen.layers.experts.kernel_plans import CodedWgmma
from mizzen.layers.quantized.canonical import Codes
from mizzen.models.block import Activation

HOPPER = (9, 0)
GATE = Gate(Activation.CLAMPED_SWIGLU, 7.0)


def make_matrices(rows: int, columns: int, *, experts: int = 4, **options: Any) -> ExpertMatrices:
    """Return matrices of E2M1 codes without memory."""
    fields: dict[str, Any] = {
        "codes": Codes.E2M1,
        "values": torch.empty(experts * rows, columns // 2, dtype=torch.uint8, device="meta"),
        "scales": torch.empty(experts * rows, columns // 32, dtype=torch.uint8, device="meta"),
        "zeros": None,
        "rows": rows,
        "columns": columns,
        "row_step": 1,
        "column_step": 32,
    }
    return ExpertMatrices(**fields | options)


GATE_UP, DOWN = make_matrices(5760, 2880), make_matrices(2880, 2880)
"""Projections of gpt-oss-20b."""
TILES = [
    tiles.tile
    for plan in CODED_PLANS.values()
    for _, tiles in plan.coded_mma
    if isinstance(tiles, CodedWgmma)
]


def place_of_column(column: int) -> int:
    """Return where coded_inputs.cu puts a column of a block of 128."""
    t, q, i, j = column // 32, column % 32 // 8, column % 4, column % 8 // 4
    return 32 * q + 8 * i + 2 * t + j


def row_of_lane(lane: int) -> int:
    g = lane // 4
    return g // 2 + g % 2 * 4


def test_operands_of_a_product_have_the_same_columns() -> None:
    """Register i of a lane in product h of word q has codes 2 h + i / 2 and 4 behind it, for all rows."""
    assert sorted(map(place_of_column, range(128))) == list(range(128))
    for q in range(4):
        for h in range(2):
            for t in range(4):
                for half in range(2):
                    inputs = (q * 2 + h) * 16 + half * 8 + t * 2
                    column = 32 * t + 8 * q + 2 * h + half
                    assert [place_of_column(column), place_of_column(column + 4)] == [inputs, inputs + 1]


def test_inner_elements_are_written_in_the_order_of_inputs() -> None:
    for unit, warp, lane in np.ndindex(4, 4, 32):
        eight, upper = unit * 32 + warp * 8, lane // 4 % 2
        place = eight // 128 * 128 + eight % 32 * 4 + lane // 8 * 8 + eight % 128 // 32 * 2
        column = eight + row_of_lane(lane)
        assert place + upper == column // 128 * 128 + place_of_column(column % 128)


def test_lanes_that_trade_outputs_of_down_have_neighbouring_rows() -> None:
    for lane in range(32):
        first = lane // 16 * 2 + lane // 4 % 2 * 4
        assert {row_of_lane(lane), row_of_lane(lane ^ 8)} == {first, first + 1}
        assert (row_of_lane(lane) == first) == (lane // 8 % 2 == 0)


def test_lanes_that_read_codes_together_do_not_conflict() -> None:
    """TMA swaps the eighths of 128 bytes of a row by the row's lowest three bits."""
    for first in range(0, 32, 8):
        for half in range(2):
            lanes = [(row_of_lane(lane), lane % 4) for lane in range(first, first + 8)]
            assert {((half * 4 + t) ^ row) for row, t in lanes} == set(range(8))
            assert all((half * 4 + t) ^ row == (t ^ row) ^ (half * 4) for row, t in lanes)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tilings_of_plans_fit_the_gpu(tile: CodedWgmmaTile) -> None:
    assert tile.n_tiles in PAIR_TILES and tile.stages >= 2 and tile.fragments in (2, 4)
    assert tile.fits(2880, 2880) and not tile.fits(2880, 8192)
    assert not tile.fits(256 * tile.stages, 2880)  # gate and up would have as many stages as the ring
    assert tile.threads <= 1024


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_kernels_compile_and_multiply_while_they_decode(tile: CodedWgmmaTile, tmp_path: Path) -> None:
    """The compiler must not wait for each product, as it does if registers in flight are touched.

    With the most pairs it does, because registers are few; it was still the fastest tiling.
    """
    source, name, definitions = kernel_spec(GATE_UP, DOWN, tile, GATE, biased=True)
    cubin = nvrtc.compile_cubin(source, name, definitions, HOPPER)
    code = disassemble(cubin, tmp_path, "--dump-sass")
    assert code.count("HGMMA") == code.count("WARPGROUP.ARRIVE") * (
        tile.fragments if tile.n_tiles <= 4 else 1
    )
    assert not re.search(r"I2F|F2F\.", code)


def test_the_kernel_of_inputs_compiles_without_spills(tmp_path: Path) -> None:
    cubin = nvrtc.compile_cubin(*inputs_spec(GATE_UP, DOWN, 4), HOPPER)
    assert re.search(r"STACK:0 ", disassemble(cubin, tmp_path, "--dump-resource-usage"))
    assert padded(2880) == 2944 and padded(2944) == 2944


def test_other_weights_are_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    down = make_matrices(64, 32)
    assert not supports(make_matrices(64, 64), down)
    monkeypatch.setattr(coded_wgmma, "has_wgmma", lambda device: True)
    assert supports(make_matrices(64, 64), down)
    for gate_up, other in (
        (make_matrices(64, 64, column_step=16), down),
        (make_matrices(64, 64, codes=Codes.UINT4), down),
        (make_matrices(64, 64, orders=SimpleNamespace()), down),
        (make_matrices(64, 64, zeros=SimpleNamespace()), down),
        (make_matrices(64, 96), make_matrices(96, 32)),
        (make_matrices(64, 64), make_matrices(64, 32, experts=129)),
    ):
        assert not supports(gate_up, other)
