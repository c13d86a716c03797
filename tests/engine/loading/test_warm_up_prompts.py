# SPDX-License-Identifier: Apache-2.0
"""The prompt that warms up steps without graphs begins without a cached prefix, and goes on with one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mizzen.core.step_plan import StepPlan
from mizzen.engine.loading.warmup import (
    MAX_SMALL_BATCH,
    WARM_UP_STEP,
    first_image_step,
    image_warm_up_plans,
    warm_up,
    warm_up_prompts,
)


class RecordingRunner:
    """Records plans, and whether prefill graphs could have run them."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.plans: list[StepPlan] = []
        self.graphs: list[object] = []

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.graphs.append(self.step.prefill_graphs)

    def collect(self) -> None:
        return None


@pytest.mark.parametrize(("supported", "size"), [(8192, MAX_SMALL_BATCH + 8), (40, 20), (1, 1)])
def test_a_prompt_runs_in_two_chunks_without_graphs(supported: int, size: int) -> None:
    step: Any = SimpleNamespace(prefill_graphs="graphs")
    runner: Any = RecordingRunner(step)
    warm_up_prompts(runner, step, WARM_UP_STEP - 2, supported)
    chunks = [plan.prefill[0] for plan in runner.plans]
    assert [(chunk.start, len(chunk.tokens), chunk.last) for chunk in chunks] == [
        (0, size, False),
        (size, size, True),
    ]
    assert [len(plan.starts) for plan in runner.plans] == [1, 0]
    assert runner.graphs == [None, None] and step.prefill_graphs == "graphs"


def test_steps_of_the_warm_up_are_consecutive(monkeypatch: pytest.MonkeyPatch) -> None:
    step: Any = SimpleNamespace(prefill_graphs=None)
    runner: Any = RecordingRunner(step)
    warm_up_prompts(runner, step, first_image_step() - 2, 100)
    geometry = SimpleNamespace(grid=(1, 2, 2), embeddings=1, pixel_shape=(2, 2, 3))
    rules: Any = SimpleNamespace(geometry=lambda width, height: geometry)
    runner.plans += image_warm_up_plans(rules, has_sections=False)
    warm_up(runner, SimpleNamespace())  # type: ignore[arg-type]
    numbers = [plan.step for plan in runner.plans]
    assert numbers == list(range(numbers[0], 1))
