# SPDX-License-Identifier: Apache-2.0
"""Opens an LLM with small pages on the CPU, and records its plans, for tests that count what is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mizzen import LLM
from mizzen.core.step_plan import StepPlan

SHARED: dict[str, Any] = {"kv_cache_tokens": 2048, "page_size": 4, "threads": 1, "check_integrity": True}


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder, device="cpu", skip_tokenizer=True, **{**SHARED, **options})


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
