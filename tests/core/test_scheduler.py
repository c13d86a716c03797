# SPDX-License-Identifier: Apache-2.0
"""Single cases of the scheduler: prefix sharing, limits, aborts, retraction, starvation and determinism."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from world import END_TOKEN, World, request

from mizzen.core.config import SchedulerConfig
from mizzen.core.events import AddRequest
from mizzen.core.policies import POLICIES
from mizzen.core.request import FinishReason, Pooling
from mizzen.core.sequence import SequencePhase
from mizzen.core.step_plan import StepPlan, StepTokens

BASE = SchedulerConfig(
    pages_total=64,
    page_size=4,
    context_length=128,
    max_running_requests=4,
    prefill_chunk_tokens=16,
    end_token_ids=(END_TOKEN,),
    steps_in_flight=2,
)


def make_world(**changes: object) -> World:
    return World(dataclasses.replace(BASE, **changes))  # type: ignore[arg-type]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(4, 12), k=length)


def test_decodes_continue_during_chunked_prefill() -> None:
    world = make_world()
    world.arrive(request(1, prompt(5), ignore_eos=True, max_tokens=40))
    world.launch()
    world.arrive(request(2, prompt(60, 1), ignore_eos=True, max_tokens=4))
    chunks = []
    for _ in range(4):
        plan = world.launch()
        assert plan is not None
        assert len(plan.decode) == 1
        chunks.append([len(chunk.tokens) for chunk in plan.prefill])
        world.collect()
    assert chunks == [[16], [16], [16], [12]]
    world.drain()


def test_long_contexts_come_first_in_a_step() -> None:
    world = make_world(prefill_chunk_tokens=64)
    lengths = {1: 9, 2: 30, 3: 17, 4: 30, 5: 21}
    limits = {1: 12, 2: 12, 3: 3, 4: 12, 5: 12}  # the fifth request starts when the third has ended
    for rid, length in lengths.items():
        world.arrive(request(rid, prompt(length, rid), ignore_eos=True, max_tokens=limits[rid]))
    orders = []
    for _ in range(8):
        plan = world.launch()
        assert plan is not None
        owners = [world.scheduler.kv.slot_owners[slot] for slot in plan.decode]
        orders.append([owner.request.rid for owner in owners if owner is not None])
        world.collect()
    assert [2, 4, 3, 1] in orders
    assert orders[-1] == [2, 4, 5, 1]
    world.drain()


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_finish_by_length_wastes_no_step(steps_in_flight: int) -> None:
    world = make_world(steps_in_flight=steps_in_flight)
    world.arrive(request(1, prompt(5), ignore_eos=True, max_tokens=7))
    world.drain()
    assert len(world.plans) == 7
    assert world.finished[1].output_tokens == 7


def test_identical_prompts_that_arrive_together_share_pages() -> None:
    world = make_world(prefill_chunk_tokens=200)
    for rid in (1, 2, 3):
        world.arrive(request(rid, prompt(64), ignore_eos=True, max_tokens=5))
    world.drain()
    assert [world.finished[rid].cached_tokens for rid in (1, 2, 3)] == [0, 60, 60]
    assert sum(len(chunk.tokens) for plan in world.plans for chunk in plan.prefill) == 64 + 4 + 4


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_request_skipped_for_a_shared_prefix_is_not_blocked_by_a_large_one(policy: str) -> None:
    world = make_world(policy=policy, prefill_chunk_tokens=200, context_length=400)
    world.arrive(request(1, prompt(60), ignore_eos=True, max_tokens=60))
    world.arrive(request(2, prompt(60), ignore_eos=True, max_tokens=5))
    world.arrive(request(3, prompt(80, 1), ignore_eos=True, max_tokens=60))
    world.arrive(request(4, prompt(120, 2), ignore_eos=True, max_tokens=5))
    for _ in range(8):
        world.launch()
        world.collect()
    assert world.output[2] and world.output[3] and not world.output[4]
    world.drain()


def test_admission_is_retried_when_the_prefix_of_a_blocked_request_becomes_cached() -> None:
    world = make_world(
        policy="priority", pages_total=80, context_length=300, reserve_tokens=0, prefill_chunk_tokens=300
    )
    shared = prompt(140, 1)
    world.arrive(request(1, prompt(80, 2), ignore_eos=True, max_tokens=80))  # 20 of 80 pages
    world.arrive(request(2, prompt(60, 3), ignore_eos=True, max_tokens=6))  # 15
    world.launch()
    world.arrive(request(3, [*shared, *prompt(50, 4)], ignore_eos=True, max_tokens=3))  # 48, too many
    world.launch()
    world.arrive(request(4, shared, ignore_eos=True, max_tokens=60, priority=1))  # 35
    turns = 0
    while not world.output[3]:
        if world.launch() is None or len(world.inflight) >= world.config.steps_in_flight:
            world.collect()
        turns += 1
        assert turns < 40, "request 3 waits although its prefix is cached"
    assert world.output[4] and 4 not in world.finished
    world.drain()


def test_output_is_cached_for_the_next_turn_of_a_chat() -> None:
    world = make_world()
    world.arrive(request(1, prompt(10), ignore_eos=True, max_tokens=20))
    world.run_until_idle()
    turn = [*prompt(10), *world.output[1], 4, 5]
    world.arrive(request(2, turn, max_tokens=3))
    world.drain()
    assert world.finished[2].cached_tokens == 28


def test_no_pages_are_shared_without_a_prefix_cache() -> None:
    world = make_world(prefix_cache="none")
    for rid in (1, 2):
        world.arrive(request(rid, prompt(32), max_tokens=3))
        world.run_until_idle()
    world.drain()
    assert world.finished[2].cached_tokens == 0


def test_rejections_name_the_reason() -> None:
    world = make_world(max_waiting_requests=1)
    world.arrive(request(1, []))
    world.arrive(request(2, prompt(128)))
    world.arrive(request(3, prompt(4)))
    world.arrive(request(4, prompt(4)))
    world.drain()
    assert world.finished[1].message == "prompt is empty; it needs at least one token"
    assert "128 tokens; the context length of 128 leaves room for 127" in world.finished[2].message
    assert world.finished[3].reason is not FinishReason.ERROR
    assert world.finished[4].message == "1 requests are waiting already; try again later"


def test_rejection_names_the_kv_capacity_if_it_is_below_the_context_length() -> None:
    world = make_world(pages_total=4)
    world.arrive(request(1, prompt(16)))
    world.arrive(request(2, prompt(15), ignore_eos=True))
    world.drain()
    assert "KV capacity of 16" in world.finished[1].message
    assert world.finished[2].reason is FinishReason.LENGTH
    assert world.finished[2].output_tokens == 1


def test_reusing_a_live_rid_raises() -> None:
    world = make_world()
    world.arrive(request(1, prompt(4)))
    world.launch()
    with pytest.raises(ValueError, match="rid 1 is already in use by a live request"):
        world.scheduler.schedule([AddRequest(request(1, prompt(4)))], 0.0)


PHASES: dict[str, tuple[int, Callable[[World], bool]]] = {
    "before its first schedule call": (8, lambda world: True),
    "waiting for a slot": (8, lambda world: phase(world) is SequencePhase.WAITING),
    "between chunks": (60, lambda world: phase(world) is SequencePhase.PREFILL),
    "first token in flight": (8, lambda world: phase(world) is SequencePhase.DECODE and not world.output[9]),
    "decoding": (8, lambda world: phase(world) is SequencePhase.DECODE and len(world.output[9]) > 2),
    "last token in flight": (8, lambda world: phase(world) is SequencePhase.LEAVING),
    "ended": (8, lambda world: 9 in world.finished),
}


def phase(world: World) -> SequencePhase | None:
    return next((living.phase for living in world.scheduler.live_sequences() if living.rid == 9), None)


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("phase_name", PHASES)
def test_abort_in_each_phase_frees_everything(phase_name: str, steps_in_flight: int) -> None:
    length, phase_is_reached = PHASES[phase_name]
    world = make_world(steps_in_flight=steps_in_flight, max_running_requests=2, page_size=1, pages_total=200)
    other_rids = (1, 2) if phase_name == "waiting for a slot" else (1,)
    for rid in other_rids:
        world.arrive(request(rid, prompt(8, rid), ignore_eos=True, max_tokens=30))
    world.arrive(request(9, prompt(length, 9), ignore_eos=True, max_tokens=8))
    for _ in range(60):
        if phase_is_reached(world):
            break
        if world.launch() is None or len(world.inflight) == steps_in_flight:
            if phase_is_reached(world):
                break
            world.collect()
    assert phase_is_reached(world)
    already_ended = 9 in world.finished
    world.abort(9)
    world.launch()
    assert (world.finished[9].reason is FinishReason.ABORT) != already_ended
    world.drain()


def test_youngest_request_is_retracted_and_resumes() -> None:
    world = make_world(pages_total=16, max_running_requests=3, reserve_tokens=0)
    for rid in (1, 2, 3):
        world.arrive(request(rid, prompt(8, rid), ignore_eos=True, max_tokens=24))
    world.drain()
    assert world.scheduler.admission.admissions > 3
    starts = [start.slot for plan in world.plans for start in plan.starts]
    assert len(starts) == world.scheduler.admission.admissions
    assert all(world.finished[rid].output_tokens == 24 for rid in (1, 2, 3))
    assert all(world.finished[rid].cached_tokens == 0 for rid in (1, 2, 3))


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_no_request_starves(policy: str) -> None:
    """A request without a cached prefix is admitted even if requests with cached prefixes keep arriving."""
    world = make_world(policy=policy, max_running_requests=1, prefill_chunk_tokens=64)
    shared = prompt(32)
    rid = 0
    for rid in range(1, 4):
        world.arrive(request(rid, shared, max_tokens=1))
    world.arrive(request(0, prompt(40, 5), max_tokens=1))
    for rid in range(4, 1200):
        world.arrive(request(rid, shared, max_tokens=1))
        world.launch()
        world.collect()
        if 0 in world.finished:
            break
    assert 0 in world.finished
    assert rid < 1000
    world.drain()


def test_equal_events_give_equal_plans() -> None:
    def plans() -> list[StepPlan]:
        chance = random.Random(7)
        world = make_world(pages_total=20)
        for rid in range(40):
            world.arrive(request(rid, prompt(chance.randrange(1, 40), rid % 3), max_tokens=9))
            if chance.random() < 0.2:
                world.abort(chance.randrange(rid + 1))
            world.launch()
            if len(world.inflight) == 2:
                world.collect()
        world.drain()
        return world.plans

    first, second = plans(), plans()
    assert len(first) == len(second)
    for plan, repeated in zip(first, second, strict=True):
        assert plan.decode.tolist() == repeated.decode.tolist()
        assert plan.decode_version == repeated.decode_version
        assert [a.pages.tolist() for a in (plan.pages,)] == [a.pages.tolist() for a in (repeated.pages,)]
        assert [(c.slot, c.start, c.tokens.tolist()) for c in plan.prefill] == [
            (c.slot, c.start, c.tokens.tolist()) for c in repeated.prefill
        ]


def test_tokens_of_a_wrong_shape_or_step_raise() -> None:
    world = make_world()
    world.arrive(request(1, prompt(4)))
    world.launch()
    with pytest.raises(ValueError, match="got tokens of step 2, but the oldest step in flight is 1"):
        world.scheduler.complete(StepTokens(2, np.zeros((1, 1), np.int32)), 0.0)
    problem = r"samples 1 tokens, one per row, but the shape of its tokens is \(2, 1\)"
    with pytest.raises(ValueError, match=problem):
        world.scheduler.complete(StepTokens(1, np.zeros((2, 1), np.int32)), 0.0)


def test_load_reports_requests_and_pages() -> None:
    world = make_world(max_running_requests=1)
    world.arrive(request(1, prompt(16), ignore_eos=True, max_tokens=9))
    world.arrive(request(2, prompt(6)))
    world.launch()
    load = world.scheduler.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (1, 1, 6)
    assert (load.pages_total, load.pages_used, load.pages_cached) == (64, 4, 0)
    world.drain()


def test_integrity_is_checked_when_idle() -> None:
    world = make_world(check_integrity=True)
    world.arrive(request(1, prompt(6), max_tokens=4))
    world.run_until_idle()
    world.launch()
    assert (world.scheduler.integrity.checks, world.scheduler.integrity.faults) == (1, 0)
    world.scheduler.kv.pool.allocate(1)
    world.arrive(request(2, prompt(6), max_tokens=1))
    world.scheduler.schedule(world.events, 0.0)
    world.scheduler.complete(StepTokens(world.scheduler.inflight.launched, np.zeros((1, 1), np.int32)), 0.0)
    world.scheduler.schedule([], 0.0)
    assert world.scheduler.integrity.checks == 2
    assert world.scheduler.integrity.faults >= 1
    [fault] = world.scheduler.integrity.drain()
    assert "page" in fault
    assert not world.scheduler.integrity.drain()


def test_config_errors_name_the_field() -> None:
    with pytest.raises(ValueError, match="--page-size must be at least 1, not 0"):
        dataclasses.replace(BASE, page_size=0)
    with pytest.raises(ValueError, match="pages_total must be at least 1, not 0"):
        dataclasses.replace(BASE, pages_total=0)
    with pytest.raises(
        ValueError, match="--policy must be one of fcfs, lpm, dfs-weight, priority, not 'random'"
    ):
        dataclasses.replace(BASE, policy="random")


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_prompt_logprobs_are_reported_once_despite_retraction(steps_in_flight: int) -> None:
    world = make_world(
        pages_total=16, prefill_chunk_tokens=2, reserve_tokens=0, steps_in_flight=steps_in_flight
    )
    world.arrive(request(1, prompt(8), ignore_eos=True, max_tokens=40))
    world.arrive(request(2, prompt(40, 1), max_tokens=3, ignore_eos=True, prompt_logprobs=1, logprobs=0))
    world.arrive(request(3, prompt(40, 2), pooling=Pooling.MEAN))
    world.drain()
    starts = [start for plan in world.plans for start in plan.starts]
    assert len(starts) > 3, "nothing was retracted"
    assert world.finished[2].reason is FinishReason.LENGTH


def test_resumed_tokens_count_as_output() -> None:
    uninterrupted = make_world()
    uninterrupted.arrive(request(1, prompt(9), ignore_eos=True, max_tokens=12, logprobs=0))
    uninterrupted.drain()
    tokens = uninterrupted.output[1]
    for cut in (1, 5, 11):
        world = make_world()
        resumed = request(
            1, prompt(9) + tokens[:cut], generated=cut, ignore_eos=True, max_tokens=12, logprobs=0
        )
        world.arrive(resumed)
        world.drain()
        assert world.output[1] == tokens
        assert (world.finished[1].prompt_tokens, world.finished[1].output_tokens) == (9, 12)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"generated": 9}, "generated is 9; of 9 tokens at least one must be the prompt's"),
        ({"generated": -1}, "generated is -1"),
        ({"generated": 4, "max_tokens": 4}, "generated is 4, max_tokens 4: the output is complete already"),
        ({"generated": 1, "pooling": Pooling.LAST}, "an embedding has no output"),
    ],
)
def test_invalid_generated_counts_are_rejected(fields: dict[str, Any], message: str) -> None:
    scheduler = make_world().scheduler
    scheduler.schedule([AddRequest(request(1, prompt(9), **fields))], 0.0)
    (end,) = scheduler.drain_finished()
    assert end.reason is FinishReason.ERROR
    assert message in end.message
