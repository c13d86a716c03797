# SPDX-License-Identifier: Apache-2.0
"""The scheduler for encoders: prompts are computed whole, in batches by tokens, and no KV is kept."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from mizzen.core.config import SchedulerConfig
from mizzen.core.events import AbortRequest, AddRequest
from mizzen.core.kv.integrity import find_integrity_faults
from mizzen.core.outputs import StepOutput
from mizzen.core.request import Finished, FinishReason, Pooling, Request
from mizzen.core.sampling_params import SamplingParams
from mizzen.core.scheduler import Scheduler
from mizzen.core.step_plan import SideOutputs, SlotVector, StepPlan, StepTokens

BASE: dict[str, Any] = {
    "pages_total": 0,
    "context_length": 11,
    "max_running_requests": 4,
    "prefill_chunk_tokens": 10,
    "prefix_cache": "none",
    "whole_prompts": True,
}


def make_scheduler(**changes: Any) -> Scheduler:
    return Scheduler(SchedulerConfig(**{**BASE, **changes}))


def add(rid: int, length: int, priority: int = 0) -> AddRequest:
    prompt = np.full(length, rid, np.int32)
    return AddRequest(
        Request(rid=rid, prompt=prompt, sampling=SamplingParams(), pooling=Pooling.MEAN, priority=priority)
    )


def run(plan: StepPlan) -> StepTokens:
    """Return the result of a step: each prompt's embedding is its first token."""
    vectors = tuple(SlotVector(c.slot, c.tokens[:1].astype(np.float32)) for c in plan.prefill)
    tokens = np.zeros((plan.samples, 1), np.int32)
    return StepTokens(plan.step, tokens, side_outputs=SideOutputs(vectors=vectors))


def rids(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    assert all(chunk.last and chunk.start == 0 for chunk in plan.prefill)
    assert not len(plan.decode)
    assert not len(plan.pages.pages)
    return [int(chunk.tokens[0]) for chunk in plan.prefill]


def vectors(output: StepOutput) -> dict[int, float]:
    return {each.rid: float(each.vector[0]) for each in output.side_outputs.vectors}


def test_prompts_are_batched_by_tokens_and_never_split() -> None:
    scheduler = make_scheduler()
    sizes = (6, 5, 4, 10, 1)
    plans = [scheduler.schedule([add(rid, size) for rid, size in enumerate(sizes)], 0.0)]
    plans.append(scheduler.schedule([], 0.0))
    assert [rids(plan) for plan in plans] == [[0], [1, 2]]
    finished: list[Finished] = []
    results: dict[int, float] = {}
    while plans:
        plan = plans.pop(0)
        assert plan is not None
        assert sum(len(chunk.tokens) for chunk in plan.prefill) <= 10
        output = scheduler.complete(run(plan), 0.0)
        assert not len(output.tokens)
        finished += output.finished
        results |= vectors(output)
        if (following := scheduler.schedule([], 0.0)) is not None:
            plans.append(following)
    assert results == {rid: float(rid) for rid in range(5)}
    assert [(each.prompt_tokens, each.output_tokens) for each in finished] == [(size, 0) for size in sizes]
    assert scheduler.load().pages_total == scheduler.load().running == 0
    assert not scheduler.has_work


def test_a_prompt_may_have_all_tokens_but_the_one_that_is_discarded() -> None:
    scheduler = make_scheduler()
    assert rids(scheduler.schedule([add(1, 10), add(2, 11)], 0.0)) == [1]
    (rejected,) = scheduler.drain_finished()
    assert (rejected.rid, rejected.reason) == (2, FinishReason.ERROR)


def test_a_step_needs_room_for_the_longest_prompt() -> None:
    with pytest.raises(ValueError, match="prefill_chunk_tokens must be at least 10"):
        SchedulerConfig(**{**BASE, "prefill_chunk_tokens": 9})


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_random_requests_and_aborts_leave_no_slot_behind(policy: str) -> None:
    scheduler = make_scheduler(policy=policy, max_running_requests=3)
    rng = random.Random(0)
    plans: list[StepPlan] = []
    waiting: set[int] = set()
    results: dict[int, float] = {}
    for rid in range(200):
        events: list[Any] = [add(rid, rng.randint(1, 10), rng.randint(0, 2))]
        waiting.add(rid)
        if rng.random() < 0.2:
            aborted = rng.choice(sorted(waiting))
            waiting.discard(aborted)
            events.append(AbortRequest(aborted))
        if (plan := scheduler.schedule(events, 0.0)) is not None:
            plans.append(plan)
        if plans and rng.random() < 0.7:
            done = vectors(scheduler.complete(run(plans.pop(0)), 0.0))
            assert done.keys() <= waiting
            waiting -= done.keys()
            results |= done
        assert find_integrity_faults(scheduler) == []
    while scheduler.has_work:
        if (plan := scheduler.schedule([], 0.0)) is not None:
            plans.append(plan)
        results |= (done := vectors(scheduler.complete(run(plans.pop(0)), 0.0)))
        waiting -= done.keys()
    assert not waiting
    assert all(value == rid for rid, value in results.items())
    assert len(scheduler.kv.free_slots) == 3
