# SPDX-License-Identifier: Apache-2.0
"""Kernels that decode experts' weights compile for Hopper without a GPU, without spills or conversions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="this PyTorch comes without Triton")

from expert_kernel_code import Compiled

from mizzen.kernels.experts import few_coded_rows, grouped_coded
from mizzen.kernels.experts.few_rows import FewRowsTile
from mizzen.kernels.experts.grouped_gemm import GroupedTile

HIDDEN, WIDTH, HELD = 2048, 768, 128
TYPES = {"values": "*i16", "bias": "*bf16"}
FEW = FewRowsTile(4, 2048, 4)
GROUPED = {
    "small": GroupedTile(16, 64, 128, 4, 4, swap=True),
    "large": GroupedTile(64, 64, 128, 3, 4, swap=False),
}
FORMATS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "fp8 blocks": (
        {"KIND": 0, "PER_BYTE": 1, "ROW_STEP": 128, "STEP": 128, "SCALES": 16, "ZEROS": False},
        {"scales": "*fp32", "zeros": "*fp32"},
    ),
    "int4": (
        {"KIND": 3, "PER_BYTE": 2, "ROW_STEP": 1, "STEP": 128, "SCALES": 16, "ZEROS": False},
        {"scales": "*bf16", "zeros": "*bf16"},
    ),
    "mxfp4": (
        {"KIND": 4, "PER_BYTE": 2, "ROW_STEP": 1, "STEP": 32, "SCALES": 64, "ZEROS": False},
        {"scales": "*u8", "zeros": "*u8"},
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_few_rows_have_all_codes_of_a_tile_in_flight(name: str, tmp_path: Path) -> None:
    constants, types = FORMATS[name]
    tile = FEW
    sizes = {"HELD": HELD, "PER_TOKEN": 8, "HIDDEN": HIDDEN, "WIDTH": WIDTH, "BIAS": False, "PDL": True}
    known = {**constants, **sizes, "GATE": 0, "ROWS": tile.rows, "COLUMNS": tile.columns}
    types = {**TYPES, **types, "values": "*u8"}
    code = Compiled(few_coded_rows._gate_up_kernel, known, types, tmp_path, num_warps=tile.warps)
    loads = 2 * tile.rows * HIDDEN // known["PER_BYTE"] // (16 * 32 * tile.warps)
    order = code.find(r"LDG\.E\.128|FMUL|FFMA")
    assert order[:loads] == ["LDG.E.128"] * loads
    assert not code.find(r"I2F[A-Z0-9.]*|F2F\.[A-Z0-9.]*") and not code.spilled


@pytest.mark.parametrize("gated", [True, False], ids=["gate-up", "down"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", GROUPED)
def test_grouped_gemms_decode_pairs_for_wgmma(size: str, name: str, gated: bool, tmp_path: Path) -> None:
    constants, types = FORMATS[name]
    tile = GROUPED[size]
    outputs, inner = (WIDTH, HIDDEN) if gated else (HIDDEN, WIDTH)
    known = {
        **constants,
        "PER_ROW": 8 if gated else 1,
        "SIZE": outputs,
        "INNER": inner,
        "GATE": 0 if gated else -1,
        "BIAS": False,
        "OUT_PARTS": 2 * constants["PER_BYTE"] if gated else 1,
        "ROWS": tile.rows,
        "OUTPUTS": tile.outputs,
        "COLUMNS": tile.columns,
        "SWAP": tile.swap,
        "SPAN": tile.span,
        "ASM": True,
        "PDL": True,
    }
    code = Compiled(
        grouped_coded._grouped_kernel,
        known,
        {**TYPES, **types},
        tmp_path,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    assert "HGMMA" in code.instructions and "LDGSTS" in code.instructions
    assert not code.spilled
