# SPDX-License-Identifier: Apache-2.0
"""Kernels that decode experts' weights compile for Hopper without a GPU, without spills or conversions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="this PyTorch comes without Triton")

from expert_kernel_code import Compiled

from mizzen.kernels.experts import few_coded_rows, grouped_coded
from mizzen.layers.experts.coded_kernel_plans import (
    CODED_PLAN,
    FEW_CODED,
    LARGE_CODED,
    SMALL_CODED,
)
from mizzen.layers.experts.kernel_plans import Grouped

HIDDEN, WIDTH, HELD = 2048, 768, 128
BYTES = {"values": "*u8", "bias": "*bf16"}
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
    tile = FEW_CODED.gate_up
    sizes = {"HELD": HELD, "PER_TOKEN": 8, "HIDDEN": HIDDEN, "WIDTH": WIDTH, "BIAS": False, "PDL": True}
    known = {**constants, **sizes, "GATE": 0, "ROWS": tile.rows, "COLUMNS": tile.columns}
    code = Compiled(few_coded_rows._gate_up_kernel, known, {**BYTES, **types}, tmp_path, num_warps=tile.warps)
    loads = 2 * tile.rows * HIDDEN // known["PER_BYTE"] // (16 * 32 * tile.warps)
    order = code.find(r"LDG\.E\.128|FMUL|FFMA")
    assert order[:loads] == ["LDG.E.128"] * loads
    assert not code.find(r"I2F[A-Z0-9.]*|F2F\.[A-Z0-9.]*") and not code.spilled


@pytest.mark.parametrize("gated", [True, False], ids=["gate-up", "down"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("variant", [SMALL_CODED, LARGE_CODED], ids=["small", "large"])
def test_grouped_gemms_decode_pairs_for_wgmma(
    variant: Grouped, name: str, gated: bool, tmp_path: Path
) -> None:
    constants, types = FORMATS[name]
    tile = variant.gate_up if gated else variant.down
    size, inner = (WIDTH, HIDDEN) if gated else (HIDDEN, WIDTH)
    known = {
        **constants,
        "PER_ROW": 8 if gated else 1,
        "SIZE": size,
        "INNER": inner,
        "GATE": 0 if gated else -1,
        "BIAS": False,
        "APART": gated,
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
        {**BYTES, **types},
        tmp_path,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    assert "HGMMA" in code.instructions and "LDGSTS" in code.instructions
    assert not code.spilled


def test_the_plan_has_as_many_rows_in_both_products() -> None:
    for variant in CODED_PLAN.variants:
        assert not isinstance(variant, Grouped) or variant.gate_up.rows == variant.down.rows
