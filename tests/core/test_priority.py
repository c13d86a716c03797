# SPDX-License-Identifier: Apache-2.0
"""Priorities: order of admission and prefill, choice of requests to preempt, and freedom from starvation."""

from __future__ import annotations

import dataclasses

import pytest
from priority_kit import make_world, step
from test_scheduler import BASE, prompt
from world import World, request

from mizzen.core import policies
from mizzen.core.request import Request


def running(world: World) -> set[int]:
    return {sequence.rid for sequence in world.scheduler.live_sequences() if sequence.slot >= 0}


def starts(world: World) -> int:
    """Return how often requests were started in slots: once per request, and once more per retraction."""
    return sum(len(plan.starts) for plan in world.plans)


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_preemption_retracts_the_youngest_request_of_the_lowest_priority(steps_in_flight: int) -> None:
    world = make_world(steps_in_flight=steps_in_flight)
    for rid, priority in ((1, 0), (2, -1), (3, -1), (4, 5)):
        world.arrive(request(rid, prompt(6, rid), ignore_eos=True, max_tokens=60, priority=priority))
    step(world, 12)
    world.arrive(request(5, prompt(6, 5), ignore_eos=True, max_tokens=8, priority=1))
    step(world, 2 * steps_in_flight + 2)
    assert running(world) == {1, 2, 4, 5}
    world.drain()  # checks that each request gets the same output as alone
    ends = list(world.finished)
    assert ends[0] == 5
    assert ends[-1] == 3


def test_preemption_retracts_as_few_requests_as_needed_for_pages() -> None:
    world = make_world(pages_total=40, max_running_requests=8, prefill_chunk_tokens=128, reserve_tokens=0)
    for rid in (1, 2, 3):
        world.arrive(request(rid, prompt(40, rid), ignore_eos=True, max_tokens=12))
    step(world, 4)
    world.arrive(request(4, prompt(60, 4), ignore_eos=True, max_tokens=9, priority=1))
    step(world, 5)
    assert running(world) == {1, 2, 4}
    world.drain()


def test_no_preemption_if_the_request_would_not_fit_anyway() -> None:
    world = make_world(pages_total=40, max_running_requests=8, prefill_chunk_tokens=128, reserve_tokens=0)
    world.arrive(request(1, prompt(80, 1), ignore_eos=True, max_tokens=20, priority=1))
    world.arrive(request(2, prompt(40, 2), ignore_eos=True, max_tokens=12))
    step(world, 4)
    world.arrive(request(3, prompt(100, 3), ignore_eos=True, max_tokens=4, priority=1))
    step(world, 6)
    assert running(world) == {1, 2}
    world.drain()


def world_with_cached_prefix(pages: int, low_priority_requests: int) -> tuple[World, list[int]]:
    """Return a world and a prefix of 20 pages, which a running request of that world holds.

    Args:
        pages: size of the KV cache, in pages of 16 tokens.
        low_priority_requests: number of running requests of a lower priority.
    """
    world = make_world(
        page_size=16, pages_total=pages, max_running_requests=16, prefill_chunk_tokens=512, context_length=640
    )
    system = prompt(320, 50)
    world.arrive(request(1, [*system, *prompt(4, 1)], ignore_eos=True, max_tokens=100, priority=1))
    step(world, 4)
    for rid in range(2, 2 + low_priority_requests):
        world.arrive(request(rid, prompt(97, rid), ignore_eos=True, max_tokens=12))
    step(world, 3)
    return world, system


def test_no_preemption_if_evictable_pages_suffice() -> None:
    world, system = world_with_cached_prefix(pages=60, low_priority_requests=4)
    assert world.scheduler.kv.available_pages < 20
    world.arrive(request(9, [*system, *prompt(40, 9)], ignore_eos=True, max_tokens=4, priority=1))
    world.drain()
    assert starts(world) == 6


def test_preemption_counts_only_uncached_pages_of_the_waiting_request() -> None:
    world, system = world_with_cached_prefix(pages=52, low_priority_requests=3)
    world.arrive(request(9, [*system, *prompt(150, 9)], ignore_eos=True, max_tokens=4, priority=1))
    step(world, 5)
    assert running(world) == {1, 2, 3, 9}
    world.drain()
    assert starts(world) == 6


def test_pages_shared_by_victims_and_the_waiting_request_count_once() -> None:
    world = make_world(
        page_size=16, pages_total=40, max_running_requests=16, prefill_chunk_tokens=512, context_length=640
    )
    system = prompt(320, 50)
    for rid in (1, 2):
        world.arrive(request(rid, [*system, *prompt(60 * rid, rid)], ignore_eos=True, max_tokens=200))
        step(world, 3)
    world.arrive(request(9, [*system, *prompt(250, 9)], ignore_eos=True, max_tokens=4, priority=1))
    step(world, 5)
    assert running(world) == {9}
    world.drain()


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_equal_priorities_do_not_preempt_each_other(policy: str) -> None:
    world = make_world()
    world = World(dataclasses.replace(BASE, policy=policy, max_running_requests=1))
    for rid in range(1, 5):
        priority = 1 if policy == "priority" else rid
        world.arrive(request(rid, prompt(6, rid), ignore_eos=True, max_tokens=9, priority=priority))
        step(world, 3)
    world.drain()
    assert list(world.finished) == [1, 2, 3, 4]
    assert starts(world) == 4


def test_retraction_under_page_shortage_starts_with_the_lowest_priority() -> None:
    world = make_world(pages_total=24, max_running_requests=2, reserve_tokens=0, prefill_chunk_tokens=128)
    world.arrive(request(1, prompt(30, 1), ignore_eos=True, max_tokens=40, priority=0))
    step(world, 2)
    world.arrive(request(2, prompt(30, 2), ignore_eos=True, max_tokens=40, priority=3))
    world.drain()
    assert list(world.finished) == [2, 1]


def test_low_priority_requests_do_not_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    patience = 40
    monkeypatch.setattr(policies, "MAX_OVERTAKES", patience)
    world = make_world(max_running_requests=1, prefill_chunk_tokens=64)
    world.arrive(request(1, prompt(4, 1), ignore_eos=True, max_tokens=12))
    rid = 1
    while 1 not in world.finished:
        if len(world.scheduler.admission.queue) < 3:
            rid += 1
            world.arrive(request(rid, prompt(3, rid % 7), max_tokens=2, ignore_eos=True, priority=1))
        step(world, 1)
        assert rid < patience + 20, "request 1 is overtaken without limit"
    world.drain()
    assert rid > patience - 5


def test_admissions_while_decoding_do_not_count_as_overtaking(monkeypatch: pytest.MonkeyPatch) -> None:
    patience = 20
    monkeypatch.setattr(policies, "MAX_OVERTAKES", patience)
    world = make_world(max_running_requests=3, pages_total=400, context_length=400, prefill_chunk_tokens=64)
    for rid in (1, 2):
        world.arrive(request(rid, prompt(6, rid), ignore_eos=True, max_tokens=390))
    for rid in range(10, 10 + 2 * patience):
        world.arrive(request(rid, prompt(3, rid), max_tokens=1))
    step(world, 2)
    while world.scheduler.admission.queue or len(running(world)) > 2:
        step(world, 1)
    for rid in (101, 102, 103):
        world.arrive(request(rid, prompt(6, rid), ignore_eos=True, max_tokens=9, priority=1))
    step(world, 8)
    assert running(world) == {101, 102, 103}
    world.drain()


def test_requests_of_equal_priority_do_not_overtake_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    patience = 20
    monkeypatch.setattr(policies, "MAX_OVERTAKES", patience)
    world = make_world(max_running_requests=1, max_waiting_requests=200)
    for rid in range(5 * patience):
        world.arrive(request(rid, prompt(3, rid), max_tokens=1, ignore_eos=True))
    while len(world.finished) < 2 * patience:
        step(world, 1)
    world.arrive(request(500, prompt(3, 5), max_tokens=1, ignore_eos=True, priority=1))
    world.drain()
    assert list(world.finished).index(500) < 2 * patience + 3
    assert list(world.finished)[-1] == 5 * patience - 1


def first_tokens(world: World, arrivals: dict[int, list[Request]], steps: int = 400) -> dict[int, int]:
    """Run `steps` steps; return the number of the step that gave each request its first token.

    `arrivals` maps the number of a step to the requests that are submitted before it.
    """
    first: dict[int, int] = {}
    for turn in range(steps):
        for arriving in arrivals.pop(turn, ()):
            world.arrive(arriving)
        step(world, 1)
        for rid, tokens in world.output.items():
            if tokens:
                first.setdefault(rid, turn)
    world.drain()
    return first


def test_high_priority_prefill_goes_before_a_running_low_priority_prefill() -> None:
    world = make_world(context_length=400, pages_total=400, prefill_chunk_tokens=4, max_running_requests=4)
    low = request(1, prompt(300, 1), ignore_eos=True, max_tokens=3)
    high = request(2, prompt(9, 2), ignore_eos=True, max_tokens=3, priority=1)
    first = first_tokens(world, {0: [low], 6: [high]})
    assert first[2] < 6 + 12 < 60 < first[1]


def test_running_prefills_are_overtaken_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    patience = 40
    monkeypatch.setattr(policies, "MAX_OVERTAKES", patience)
    world = make_world(context_length=400, pages_total=400, prefill_chunk_tokens=4, max_running_requests=4)
    world.arrive(request(1, prompt(100, 1), ignore_eos=True, max_tokens=3))
    step(world, 4)
    rid = 1
    while not world.output[1]:
        if len(world.scheduler.admission.queue) < 3:
            rid += 1
            world.arrive(request(rid, prompt(8, rid % 7 + 20), max_tokens=2, ignore_eos=True, priority=1))
        step(world, 1)
        assert rid < patience + 60, "request 1 is overtaken without limit"
    assert rid > patience
    world.drain()


def test_no_preemption_if_running_prefills_would_delay_the_request_anyway() -> None:
    world = make_world(context_length=400, pages_total=400, prefill_chunk_tokens=4, max_running_requests=2)
    world.arrive(request(1, prompt(4, 1), ignore_eos=True, max_tokens=200))
    step(world, 4)
    world.arrive(request(2, prompt(200, 2), ignore_eos=True, max_tokens=3, priority=2))
    step(world, 4)
    world.arrive(request(3, prompt(4, 3), ignore_eos=True, max_tokens=3, priority=1))
    step(world, 30)
    assert running(world) == {1, 2}  # the prefill of 2 uses the whole chunk budget, which 3 would need
    world.drain()
    assert list(world.finished)[:2] == [2, 3]
