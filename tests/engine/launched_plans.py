# SPDX-License-Identifier: Apache-2.0
"""Records the plans that an engine launches, for tests that count what is computed."""

from __future__ import annotations

from mizzen import LLM
from mizzen.core.step_plan import StepPlan


def record_plans(llm: LLM) -> list[StepPlan]:
    """Return a list to which the plans of an engine are added when they are launched."""
    plans: list[StepPlan] = []
    runner = llm.engine._loop._runner
    launch = runner.launch

    def recording_launch(plan: StepPlan) -> None:
        plans.append(plan)
        launch(plan)

    runner.launch = recording_launch  # type: ignore[method-assign]
    return plans


def prompt_tokens(plans: list[StepPlan]) -> int:
    """Return the number of prompt tokens that plans compute."""
    return sum(len(chunk.tokens) for plan in plans for chunk in plan.prefill)
