"""Priorities: who goes first, who makes room, who stays in the cache, and that nobody starves."""

from __future__ import annotations

import dataclasses

import pytest
from priority_kit import step, world
from test_scheduler import BASE, prompt
from world import World, request

from mizzen.core import policies
from mizzen.core.request import Request


def running(here: World) -> set[int]:
    return {sequence.rid for sequence in here.scheduler.live_sequences() if sequence.slot >= 0}


def starts(here: World) -> int:
    """Return how often requests took a slot: once each, and again after each retraction."""
    return sum(len(plan.starts) for plan in here.plans)


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_preemption_retracts_the_youngest_request_of_the_lowest_priority(steps_in_flight: int) -> None:
    here = world(steps_in_flight=steps_in_flight)
    for rid, priority in ((1, 0), (2, -1), (3, -1), (4, 5)):
        here.arrive(request(rid, prompt(6, rid), ignore_eos=True, max_tokens=60, priority=priority))
    step(here, 12)
    here.arrive(request(5, prompt(6, 5), ignore_eos=True, max_tokens=8, priority=1))
    step(here, 2 * steps_in_flight + 2)
    assert running(here) == {1, 2, 4, 5}
    here.drain()  # each gets what it gets alone
    ends = list(here.finished)
    assert ends[0] == 5
    assert ends[-1] == 3


def test_preemption_retracts_as_few_requests_as_needed_for_pages() -> None:
    here = world(pages_total=40, max_running_requests=8, prefill_chunk_tokens=128, reserve_tokens=0)
    for rid in (1, 2, 3):
        here.arrive(request(rid, prompt(40, rid), ignore_eos=True, max_tokens=12))
    step(here, 4)
    here.arrive(request(4, prompt(60, 4), ignore_eos=True, max_tokens=9, priority=1))
    step(here, 5)
    assert running(here) == {1, 2, 4}
    here.drain()


def test_no_preemption_if_the_request_would_not_fit_anyway() -> None:
    here = world(pages_total=40, max_running_requests=8, prefill_chunk_tokens=128, reserve_tokens=0)
    here.arrive(request(1, prompt(80, 1), ignore_eos=True, max_tokens=20, priority=1))
    here.arrive(request(2, prompt(40, 2), ignore_eos=True, max_tokens=12))
    step(here, 4)
    here.arrive(request(3, prompt(100, 3), ignore_eos=True, max_tokens=4, priority=1))
    step(here, 6)
    assert running(here) == {1, 2}
    here.drain()


def beside_a_cached_prefix(pages: int, others: int) -> tuple[World, list[int]]:
    """Return a world where a prefix of 20 pages is held and so many of a low priority run, and the prefix."""
    here = world(
        page_size=16, pages_total=pages, max_running_requests=16, prefill_chunk_tokens=512, context_length=640
    )
    system = prompt(320, 50)
    here.arrive(request(1, [*system, *prompt(4, 1)], ignore_eos=True, max_tokens=100, priority=1))
    step(here, 4)
    for rid in range(2, 2 + others):
        here.arrive(request(rid, prompt(97, rid), ignore_eos=True, max_tokens=12))
    step(here, 3)
    return here, system


def test_no_preemption_if_evictable_pages_suffice() -> None:
    here, system = beside_a_cached_prefix(pages=60, others=4)
    assert here.scheduler.kv.available_pages < 20
    here.arrive(request(9, [*system, *prompt(40, 9)], ignore_eos=True, max_tokens=4, priority=1))
    here.drain()
    assert starts(here) == 6


def test_preemption_counts_only_uncached_pages_of_the_waiting_request() -> None:
    here, system = beside_a_cached_prefix(pages=52, others=3)
    here.arrive(request(9, [*system, *prompt(150, 9)], ignore_eos=True, max_tokens=4, priority=1))
    step(here, 5)
    assert running(here) == {1, 2, 3, 9}
    here.drain()
    assert starts(here) == 6


def test_pages_shared_by_victims_and_the_waiting_request_count_once() -> None:
    here = world(
        page_size=16, pages_total=40, max_running_requests=16, prefill_chunk_tokens=512, context_length=640
    )
    system = prompt(320, 50)
    for rid in (1, 2):
        here.arrive(request(rid, [*system, *prompt(60 * rid, rid)], ignore_eos=True, max_tokens=200))
        step(here, 3)
    here.arrive(request(9, [*system, *prompt(250, 9)], ignore_eos=True, max_tokens=4, priority=1))
    step(here, 5)
    assert running(here) == {9}
    here.drain()


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_equal_priorities_do_not_preempt_each_other(policy: str) -> None:
    here = world()
    here = World(dataclasses.replace(BASE, policy=policy, max_running_requests=1))
    for rid in range(1, 5):
        priority = 1 if policy == "priority" else rid
        here.arrive(request(rid, prompt(6, rid), ignore_eos=True, max_tokens=9, priority=priority))
        step(here, 3)
    here.drain()
    assert list(here.finished) == [1, 2, 3, 4]
    assert starts(here) == 4


def test_retraction_under_page_shortage_starts_with_the_lowest_priority() -> None:
    here = world(pages_total=24, max_running_requests=2, reserve_tokens=0, prefill_chunk_tokens=128)
    here.arrive(request(1, prompt(30, 1), ignore_eos=True, max_tokens=40, priority=0))
    step(here, 2)
    here.arrive(request(2, prompt(30, 2), ignore_eos=True, max_tokens=40, priority=3))
    here.drain()
    assert list(here.finished) == [2, 1]


def test_low_priority_requests_do_not_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    patience = 40
    monkeypatch.setattr(policies, "MAX_OVERTAKES", patience)
    here = world(max_running_requests=1, prefill_chunk_tokens=64)
    here.arrive(request(1, prompt(4, 1), ignore_eos=True, max_tokens=12))
    rid = 1
    while 1 not in here.finished:
        if len(here.scheduler.admission.queue) < 3:
            rid += 1
            here.arrive(request(rid, prompt(3, rid % 7), max_tokens=2, ignore_eos=True, priority=1))
        step(here, 1)
        assert rid < patience + 20, "it is overtaken for ever"
    here.drain()
    assert rid > patience - 5


def test_admissions_while_decoding_do_not_count_as_overtaking(monkeypatch: pytest.MonkeyPatch) -> None:
    patience = 20
    monkeypatch.setattr(policies, "MAX_OVERTAKES", patience)
    here = world(max_running_requests=3, pages_total=400, context_length=400, prefill_chunk_tokens=64)
    for rid in (1, 2):
        here.arrive(request(rid, prompt(6, rid), ignore_eos=True, max_tokens=390))
    for rid in range(10, 10 + 2 * patience):
        here.arrive(request(rid, prompt(3, rid), max_tokens=1))
    step(here, 2)
    while here.scheduler.admission.queue or len(running(here)) > 2:
        step(here, 1)
    for rid in (101, 102, 103):
        here.arrive(request(rid, prompt(6, rid), ignore_eos=True, max_tokens=9, priority=1))
    step(here, 8)
    assert running(here) == {101, 102, 103}
    here.drain()


def test_requests_of_equal_priority_do_not_overtake_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    patience = 20
    monkeypatch.setattr(policies, "MAX_OVERTAKES", patience)
    here = world(max_running_requests=1, max_waiting_requests=200)
    for rid in range(5 * patience):
        here.arrive(request(rid, prompt(3, rid), max_tokens=1, ignore_eos=True))
    while len(here.finished) < 2 * patience:
        step(here, 1)
    here.arrive(request(500, prompt(3, 5), max_tokens=1, ignore_eos=True, priority=1))
    here.drain()
    assert list(here.finished).index(500) < 2 * patience + 3
    assert list(here.finished)[-1] == 5 * patience - 1


def first_tokens(here: World, arrivals: dict[int, list[Request]], steps: int = 400) -> dict[int, int]:
    """Return the step that gave each request its first token; `arrivals` are by the step before them."""
    first: dict[int, int] = {}
    for turn in range(steps):
        for asked in arrivals.pop(turn, ()):
            here.arrive(asked)
        step(here, 1)
        for rid, tokens in here.output.items():
            if tokens:
                first.setdefault(rid, turn)
    here.drain()
    return first


def test_high_priority_prefill_goes_before_a_running_low_priority_prefill() -> None:
    here = world(context_length=400, pages_total=400, prefill_chunk_tokens=4, max_running_requests=4)
    low = request(1, prompt(300, 1), ignore_eos=True, max_tokens=3)
    high = request(2, prompt(9, 2), ignore_eos=True, max_tokens=3, priority=1)
    first = first_tokens(here, {0: [low], 6: [high]})
    assert first[2] < 6 + 12 < 60 < first[1]


def test_running_prefills_are_overtaken_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    patience = 40
    monkeypatch.setattr(policies, "MAX_OVERTAKES", patience)
    here = world(context_length=400, pages_total=400, prefill_chunk_tokens=4, max_running_requests=4)
    here.arrive(request(1, prompt(100, 1), ignore_eos=True, max_tokens=3))
    step(here, 4)
    rid = 1
    while not here.output[1]:
        if len(here.scheduler.admission.queue) < 3:
            rid += 1
            here.arrive(request(rid, prompt(8, rid % 7 + 20), max_tokens=2, ignore_eos=True, priority=1))
        step(here, 1)
        assert rid < patience + 60, "it is overtaken for ever"
    assert rid > patience
    here.drain()


def test_no_preemption_if_running_prefills_would_delay_the_request_anyway() -> None:
    here = world(context_length=400, pages_total=400, prefill_chunk_tokens=4, max_running_requests=2)
    here.arrive(request(1, prompt(4, 1), ignore_eos=True, max_tokens=200))
    step(here, 4)
    here.arrive(request(2, prompt(200, 2), ignore_eos=True, max_tokens=3, priority=2))
    step(here, 4)
    here.arrive(request(3, prompt(4, 3), ignore_eos=True, max_tokens=3, priority=1))
    step(here, 30)
    assert running(here) == {1, 2}  # the prompt of 2 takes all that 3 could get
    here.drain()
    assert list(here.finished)[:2] == [2, 3]
