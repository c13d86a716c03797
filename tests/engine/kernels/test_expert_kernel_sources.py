# SPDX-License-Identifier: Apache-2.0
"""Kernels of experts compile for Hopper without a GPU, to machine code with properties that make them fast.

The shape is that of Qwen3-30B-A3B.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="this PyTorch comes without Triton")

from expert_kernel_code import Compiled

from mizzen.kernels.experts import few_rows, grouped_gemm, router
from mizzen.layers.activation import ActivationFunction
from mizzen.layers.context import BuildContext
from mizzen.layers.experts.kernel_plans import (
    FEW_ROWS,
    HOPPER_PLAN,
    MEDIUM,
    PROMPTS,
    SMALL,
    ExpertSizes,
    Grouped,
    Library,
    Variant,
)
from mizzen.layers.experts.kernel_product import KernelProduct
from mizzen.models.block import Activation

HELD, PER_TOKEN, HIDDEN, WIDTH = 128, 8, 2048, 768
MAX_SHARED_BYTES = 227 * 1024
SHAPE = {"HELD": HELD, "PER_TOKEN": PER_TOKEN, "HIDDEN": HIDDEN, "WIDTH": WIDTH, "BIAS": False, "PDL": True}


def test_few_rows_have_all_weights_of_a_tile_in_flight(tmp_path: Path) -> None:
    tile = FEW_ROWS.gate_up
    constants = {**SHAPE, "GATE": 0, "ROWS": tile.rows, "COLUMNS": tile.columns}
    code = Compiled(few_rows._gate_up_kernel, constants, {}, tmp_path, num_warps=tile.warps)
    loads_of_weights = 2 * tile.rows * HIDDEN * 2 // (16 * 32 * tile.warps)
    order = code.find(r"LDG\.E\.128|FMUL|FFMA")
    assert order[:loads_of_weights] == ["LDG.E.128"] * loads_of_weights
    assert not code.spilled


def test_down_of_few_rows_loads_weights_before_the_pdl_wait(tmp_path: Path) -> None:
    tile = FEW_ROWS.down
    constants = {**SHAPE, "PADDED": 8, "ADD": False, "ROWS": tile.rows, "COLUMNS": tile.columns}
    code = Compiled(few_rows._down_kernel, constants, {}, tmp_path, num_warps=tile.warps)
    order = code.find(r"LDG\.E\.128(?!\.STRONG)|ACQBULK")
    assert order.index("ACQBULK") == PER_TOKEN * tile.rows * tile.columns * 2 // (16 * 32 * tile.warps)
    assert not code.spilled


@pytest.mark.parametrize(
    ("variant", "gated", "instruction"),
    [(SMALL, True, "HGMMA.64x16x16"), (SMALL, False, "HGMMA.64x16x16"), (PROMPTS, False, "HGMMA.64x256x16")],
    ids=["small gate-up", "small down", "prompts down"],
)
def test_grouped_gemms_use_wgmma_without_spills(
    variant: Grouped, gated: bool, instruction: str, tmp_path: Path
) -> None:
    tile = variant.gate_up if gated else variant.down
    size, inner = (WIDTH, HIDDEN) if gated else (HIDDEN, WIDTH)
    constants = {
        "PER_ROW": PER_TOKEN if gated else 1,
        "SIZE": size,
        "INNER": inner,
        "GATE": 0 if gated else -1,
        "BIAS": False,
        "ROWS": tile.rows,
        "OUTPUTS": tile.outputs,
        "COLUMNS": tile.columns,
        "SWAP": tile.swap,
        "SPAN": tile.span,
        "PDL": True,
    }
    code = Compiled(
        grouped_gemm._grouped_kernel, constants, {}, tmp_path, num_warps=tile.warps, num_stages=tile.stages
    )
    assert instruction in code.instructions and "LDGSTS" in code.instructions
    assert not code.spilled
    # Two blocks of small tiles fit on an SM, so that one loads while the other ends.
    assert code.shared <= MAX_SHARED_BYTES // (2 if variant is SMALL else 1) - 1024


def test_the_choice_of_experts_compiles_without_spills(tmp_path: Path) -> None:
    flags = ("LOGIT_BIAS", "CORRECTION", "LIVE", "RENORMALIZE", "LIBRARY", "PDL")
    sizes = {"COUNT": 256, "HELD": 256, "PER_TOKEN": 8, "PADDED": 8, "GROUPS": 8, "TOP_GROUPS": 4}
    constants = {
        **sizes,
        "GROUPS_PADDED": 8,
        "GROUP_PADDED": 32,
        "SOFTMAX": False,
        **dict.fromkeys(flags, True),
    }
    floats = dict.fromkeys(("logits", "logit_bias", "correction"), "*fp32")
    types = {**floats, "live": "*i1", "first": "i32"}
    assert not Compiled(router._choose_kernel, constants, types, tmp_path, num_warps=1).spilled


QWEN3, GPT_OSS, MIXTRAL = (
    (8, ExpertSizes(128, 2048, 768)),
    (4, ExpertSizes(32, 2880, 2880)),
    (2, ExpertSizes(8, 4096, 14336)),
)

(_, MANY_CLUSTERS), (_, MANY) = HOPPER_PLAN.many_rows


@pytest.mark.parametrize(
    ("shape", "tokens", "fastest"),
    [
        *((QWEN3, tokens, SMALL) for tokens in (8, 32, 64, 128)),
        *((QWEN3, 1, FEW_ROWS), (QWEN3, 512, MANY), (QWEN3, 8192, MANY_CLUSTERS)),
        *((GPT_OSS, tokens, SMALL) for tokens in (8, 32, 64)),
        *(
            (GPT_OSS, 1, FEW_ROWS),
            (GPT_OSS, 128, MEDIUM),
            (GPT_OSS, 512, MANY),
            (GPT_OSS, 8192, MANY_CLUSTERS),
        ),
        *((MIXTRAL, 1, FEW_ROWS), (MIXTRAL, 8, SMALL), (MIXTRAL, 32, SMALL), (MIXTRAL, 64, MEDIUM)),
        *((MIXTRAL, 128, MANY), (MIXTRAL, 512, MANY_CLUSTERS), (MIXTRAL, 8192, MANY_CLUSTERS)),
    ],
)
def test_the_plan_chooses_what_was_measured_to_be_fastest(
    shape: tuple[int, ExpertSizes], tokens: int, fastest: Variant
) -> None:
    per_token, sizes = shape
    assert HOPPER_PLAN.variant(tokens, per_token, sizes) == fastest


@pytest.mark.parametrize(("per_token", "sizes"), [QWEN3, GPT_OSS, MIXTRAL])
def test_all_chosen_kernels_are_compiled_before_requests(per_token: int, sizes: ExpertSizes) -> None:
    found = {HOPPER_PLAN.variant(tokens, per_token, sizes) for tokens in range(1, 65537)}
    # Without their compiler, `ManyRows` are missing.
    fallback = replace(HOPPER_PLAN, many_rows=())
    found |= {fallback.variant(tokens, per_token, sizes) for tokens in range(1, 65537)}
    assert found - {Library()} == set(HOPPER_PLAN.variants)
    for variant in HOPPER_PLAN.variants:
        if isinstance(variant, Grouped):
            assert variant.gate_up.rows == variant.down.rows


def test_experts_of_other_ranks_do_not_change_the_choice() -> None:
    """The mean number of rows is that of all experts, because ranks get the pairs of their own only."""
    down = torch.empty(32, 2048, 768)
    activation = ActivationFunction(BuildContext(device=down.device, dtype=down.dtype), Activation.SILU)
    library: Any = None
    product = KernelProduct(down, down, activation, None, library, experts=128)
    assert product.sizes == QWEN3[1]
