# SPDX-License-Identifier: Apache-2.0
"""Steps that warm up an engine for images, and the row counts of kernels that steps without graphs need."""

from __future__ import annotations

from pathlib import Path

import pytest
from image_prompts import read_rules, save_image_twin

from mizzen.engine.loading.warmup import eager_row_counts, image_warm_up_plans
from mizzen.kernels.gemm import swap_ab


@pytest.mark.parametrize("name", ["qwen2.5-vl", "llava-next"])
def test_steps_with_images_cover_all_row_groups_and_decodes(name: str, tmp_path: Path) -> None:
    save_image_twin(tmp_path, name)
    plans = list(image_warm_up_plans(read_rules(tmp_path), has_sections=name.startswith("qwen")))
    rows = [len(plan.decode) + sum(len(chunk.tokens) for chunk in plan.prefill) for plan in plans]
    assert {-(-count // 8) for count in rows} == {1, 2}
    assert 1 in rows
    assert any(len(plan.decode) and plan.prefill for plan in plans)
    encoded = [encoding.digest for plan in plans for encoding in plan.encodings]
    assert encoded == [digest for plan in plans for digest in plan.dropped_images]
    assert plans[-1].step == -6
    assert [plan.step for plan in plans] == sorted({plan.step for plan in plans})


@pytest.mark.parametrize("most", [1, 40, 72, 4096])
@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 3072), (12288, 4096)])
def test_small_products_of_any_step_are_compiled_at_the_start(most: int, shape: tuple[int, int]) -> None:
    compiled = swap_ab.kernel_specs(*shape, eager_row_counts(most))
    assert swap_ab.kernel_specs(*shape, range(1, min(most, 256) + 1)) <= compiled
