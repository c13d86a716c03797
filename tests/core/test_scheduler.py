"""Named cases: sharing, limits, aborts in every phase, retraction, starvation, determinism."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from world import END_TOKEN, World, request

from mizzen.core.config import SchedulerConfig
from mizzen.core.events import Arrive
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


def world(**changes: object) -> World:
    return World(dataclasses.replace(BASE, **changes))  # type: ignore[arg-type]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(4, 12), k=length)


def test_decodes_continue_during_chunked_prefill() -> None:
    here = world()
    here.arrive(request(1, prompt(5), ignore_eos=True, max_tokens=40))
    here.launch()
    here.arrive(request(2, prompt(60, 1), ignore_eos=True, max_tokens=4))
    chunks = []
    for _ in range(4):
        plan = here.launch()
        assert plan is not None
        assert len(plan.decode) == 1
        chunks.append([len(chunk.tokens) for chunk in plan.prefill])
        here.collect()
    assert chunks == [[16], [16], [16], [12]]
    here.drain()


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_finish_by_length_wastes_no_step(steps_in_flight: int) -> None:
    here = world(steps_in_flight=steps_in_flight)
    here.arrive(request(1, prompt(5), ignore_eos=True, max_tokens=7))
    here.drain()
    assert len(here.plans) == 7
    assert here.finished[1].output_tokens == 7


def test_identical_prompts_that_arrive_together_share_pages() -> None:
    here = world(prefill_chunk_tokens=200)
    for rid in (1, 2, 3):
        here.arrive(request(rid, prompt(64), ignore_eos=True, max_tokens=5))
    here.drain()
    assert [here.finished[rid].cached_tokens for rid in (1, 2, 3)] == [0, 60, 60]
    assert sum(len(chunk.tokens) for plan in here.plans for chunk in plan.prefill) == 64 + 4 + 4


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_request_skipped_for_a_shared_prefix_is_not_blocked_by_a_large_one(policy: str) -> None:
    here = world(policy=policy, prefill_chunk_tokens=200, context_length=400)
    here.arrive(request(1, prompt(60), ignore_eos=True, max_tokens=60))
    here.arrive(request(2, prompt(60), ignore_eos=True, max_tokens=5))
    here.arrive(request(3, prompt(80, 1), ignore_eos=True, max_tokens=60))
    here.arrive(request(4, prompt(120, 2), ignore_eos=True, max_tokens=5))
    for _ in range(8):
        here.launch()
        here.collect()
    assert here.output[2] and here.output[3] and not here.output[4]
    here.drain()


def test_admission_is_retried_when_the_prefix_of_a_blocked_request_becomes_cached() -> None:
    here = world(
        policy="priority", pages_total=80, context_length=300, reserve_tokens=0, prefill_chunk_tokens=300
    )
    shared = prompt(140, 1)
    here.arrive(request(1, prompt(80, 2), ignore_eos=True, max_tokens=80))  # 20 of 80 pages
    here.arrive(request(2, prompt(60, 3), ignore_eos=True, max_tokens=6))  # 15
    here.launch()
    here.arrive(request(3, [*shared, *prompt(50, 4)], ignore_eos=True, max_tokens=3))  # 48, too many
    here.launch()
    here.arrive(request(4, shared, ignore_eos=True, max_tokens=60, priority=1))  # 35
    turns = 0
    while not here.output[3]:
        if here.launch() is None or len(here.flying) >= here.config.steps_in_flight:
            here.collect()
        turns += 1
        assert turns < 40, "it waits though its prefix is cached"
    assert here.output[4] and 4 not in here.finished
    here.drain()


def test_output_is_cached_for_the_next_turn_of_a_chat() -> None:
    here = world()
    here.arrive(request(1, prompt(10), ignore_eos=True, max_tokens=20))
    here.drain_running()
    turn = [*prompt(10), *here.output[1], 4, 5]
    here.arrive(request(2, turn, max_tokens=3))
    here.drain()
    assert here.finished[2].cached_tokens == 28


def test_no_pages_are_shared_without_a_prefix_cache() -> None:
    here = world(prefix_cache="none")
    for rid in (1, 2):
        here.arrive(request(rid, prompt(32), max_tokens=3))
        here.drain_running()
    here.drain()
    assert here.finished[2].cached_tokens == 0


def test_rejections_name_the_reason() -> None:
    here = world(max_waiting_requests=1)
    here.arrive(request(1, []))
    here.arrive(request(2, prompt(128)))
    here.arrive(request(3, prompt(4)))
    here.arrive(request(4, prompt(4)))
    here.drain()
    assert here.finished[1].message == "prompt is empty; it needs at least one token"
    assert "128 tokens; the context length of 128 leaves room for 127" in here.finished[2].message
    assert here.finished[3].reason is not FinishReason.ERROR
    assert here.finished[4].message == "1 requests are waiting already; try again later"


def test_rejection_names_the_kv_capacity_if_it_is_below_the_context_length() -> None:
    here = world(pages_total=4)
    here.arrive(request(1, prompt(16)))
    here.arrive(request(2, prompt(15), ignore_eos=True))
    here.drain()
    assert "KV capacity of 16" in here.finished[1].message
    assert here.finished[2].reason is FinishReason.LENGTH
    assert here.finished[2].output_tokens == 1


def test_reusing_a_live_rid_raises() -> None:
    here = world()
    here.arrive(request(1, prompt(4)))
    here.launch()
    with pytest.raises(ValueError, match="rid 1 is already in use by a live request"):
        here.scheduler.schedule([Arrive(request(1, prompt(4)))], 0.0)


PHASES: dict[str, tuple[int, Callable[[World], bool]]] = {
    "before the scheduler saw it": (8, lambda here: True),
    "waiting for a slot": (8, lambda here: phase(here) is SequencePhase.WAITING),
    "between chunks": (60, lambda here: phase(here) is SequencePhase.PREFILL),
    "first token in flight": (8, lambda here: phase(here) is SequencePhase.DECODE and not here.output[9]),
    "decoding": (8, lambda here: phase(here) is SequencePhase.DECODE and len(here.output[9]) > 2),
    "last token in flight": (8, lambda here: phase(here) is SequencePhase.LEAVING),
    "ended": (8, lambda here: 9 in here.finished),
}


def phase(here: World) -> SequencePhase | None:
    return next((living.phase for living in here.scheduler.live_sequences() if living.rid == 9), None)


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("when", PHASES)
def test_abort_in_each_phase_frees_everything(when: str, steps_in_flight: int) -> None:
    length, reached = PHASES[when]
    here = world(steps_in_flight=steps_in_flight, max_running_requests=2, page_size=1, pages_total=200)
    others = (1, 2) if when == "waiting for a slot" else (1,)
    for rid in others:
        here.arrive(request(rid, prompt(8, rid), ignore_eos=True, max_tokens=30))
    here.arrive(request(9, prompt(length, 9), ignore_eos=True, max_tokens=8))
    for _ in range(60):
        if reached(here):
            break
        if here.launch() is None or len(here.flying) == steps_in_flight:
            if reached(here):
                break
            here.collect()
    assert reached(here)
    ended = 9 in here.finished
    here.abort(9)
    here.launch()
    assert (here.finished[9].reason is FinishReason.ABORT) != ended
    here.drain()


def test_youngest_request_is_retracted_and_resumes() -> None:
    here = world(pages_total=16, max_running_requests=3, reserve_tokens=0)
    for rid in (1, 2, 3):
        here.arrive(request(rid, prompt(8, rid), ignore_eos=True, max_tokens=24))
    here.drain()
    assert here.scheduler.admission.admissions > 3
    starts = [start.slot for plan in here.plans for start in plan.starts]
    assert len(starts) == here.scheduler.admission.admissions
    assert all(here.finished[rid].output_tokens == 24 for rid in (1, 2, 3))
    assert all(here.finished[rid].cached_tokens == 0 for rid in (1, 2, 3))


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_no_request_starves(policy: str) -> None:
    """A stream of requests with a cached prefix never ends; one without must get its turn."""
    here = world(policy=policy, max_running_requests=1, prefill_chunk_tokens=64)
    shared = prompt(32)
    rid = 0
    for rid in range(1, 4):
        here.arrive(request(rid, shared, max_tokens=1))
    here.arrive(request(0, prompt(40, 5), max_tokens=1))
    for rid in range(4, 1200):
        here.arrive(request(rid, shared, max_tokens=1))
        here.launch()
        here.collect()
        if 0 in here.finished:
            break
    assert 0 in here.finished
    assert rid < 1000
    here.drain()


def test_equal_events_give_equal_plans() -> None:
    def plans() -> list[StepPlan]:
        chance = random.Random(7)
        here = world(pages_total=20)
        for rid in range(40):
            here.arrive(request(rid, prompt(chance.randrange(1, 40), rid % 3), max_tokens=9))
            if chance.random() < 0.2:
                here.abort(chance.randrange(rid + 1))
            here.launch()
            if len(here.flying) == 2:
                here.collect()
        here.drain()
        return here.plans

    first, second = plans(), plans()
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.decode.tolist() == other.decode.tolist()
        assert one.decode_version == other.decode_version
        assert [a.pages.tolist() for a in (one.pages,)] == [a.pages.tolist() for a in (other.pages,)]
        assert [(c.slot, c.start, c.tokens.tolist()) for c in one.prefill] == [
            (c.slot, c.start, c.tokens.tolist()) for c in other.prefill
        ]


def test_tokens_of_a_wrong_shape_or_step_raise() -> None:
    here = world()
    here.arrive(request(1, prompt(4)))
    here.launch()
    with pytest.raises(ValueError, match="tokens of step 2 came, the oldest step in flight is 1"):
        here.scheduler.complete(StepTokens(2, np.zeros((1, 1), np.int32)), 0.0)
    with pytest.raises(ValueError, match=r"samples 1 tokens, one a row; the shape of its tokens is \(2, 1\)"):
        here.scheduler.complete(StepTokens(1, np.zeros((2, 1), np.int32)), 0.0)


def test_load_reports_requests_and_pages() -> None:
    here = world(max_running_requests=1)
    here.arrive(request(1, prompt(16), ignore_eos=True, max_tokens=9))
    here.arrive(request(2, prompt(6)))
    here.launch()
    load = here.scheduler.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (1, 1, 6)
    assert (load.pages_total, load.pages_used, load.pages_cached) == (64, 4, 0)
    here.drain()


def test_integrity_is_checked_when_idle() -> None:
    here = world(check_integrity=True)
    here.arrive(request(1, prompt(6), max_tokens=4))
    here.drain_running()
    here.launch()
    assert (here.scheduler.integrity.checks, here.scheduler.integrity.faults) == (1, 0)
    here.scheduler.kv.pool.allocate(1)
    here.arrive(request(2, prompt(6), max_tokens=1))
    here.scheduler.schedule(here.events, 0.0)
    here.scheduler.complete(StepTokens(here.scheduler.inflight.launched, np.zeros((1, 1), np.int32)), 0.0)
    here.scheduler.schedule([], 0.0)
    assert here.scheduler.integrity.checks == 2
    assert here.scheduler.integrity.faults >= 1
    [fault] = here.scheduler.integrity.drain()
    assert "page" in fault
    assert not here.scheduler.integrity.drain()


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
    here = world(pages_total=16, prefill_chunk_tokens=2, reserve_tokens=0, steps_in_flight=steps_in_flight)
    here.arrive(request(1, prompt(8), ignore_eos=True, max_tokens=40))
    here.arrive(request(2, prompt(40, 1), max_tokens=3, ignore_eos=True, prompt_logprobs=1, logprobs=0))
    here.arrive(request(3, prompt(40, 2), pooling=Pooling.MEAN))
    here.drain()
    starts = [start for plan in here.plans for start in plan.starts]
    assert len(starts) > 3, "nothing was retracted"
    assert here.finished[2].reason is FinishReason.LENGTH


def test_resumed_tokens_count_as_output() -> None:
    whole = world()
    whole.arrive(request(1, prompt(9), ignore_eos=True, max_tokens=12, logprobs=0))
    whole.drain()
    tokens = whole.output[1]
    for cut in (1, 5, 11):
        here = world()
        rest = request(1, prompt(9) + tokens[:cut], generated=cut, ignore_eos=True, max_tokens=12, logprobs=0)
        here.arrive(rest)
        here.drain()
        assert here.output[1] == tokens
        assert (here.finished[1].prompt_tokens, here.finished[1].output_tokens) == (9, 12)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"generated": 9}, "generated is 9; of 9 tokens at least one must be the prompt's"),
        ({"generated": -1}, "generated is -1"),
        ({"generated": 4, "max_tokens": 4}, "generated is 4, max_tokens 4: the output is complete already"),
        ({"generated": 1, "pooling": Pooling.LAST}, "an embedding has no output"),
    ],
)
def test_invalid_generated_counts_are_rejected(wrong: dict[str, Any], message: str) -> None:
    scheduler = world().scheduler
    scheduler.schedule([Arrive(request(1, prompt(9), **wrong))], 0.0)
    (end,) = scheduler.drain_finished()
    assert end.reason is FinishReason.ERROR
    assert message in end.message
