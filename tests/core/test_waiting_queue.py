"""Priorities: who goes first, who makes room, who stays in the cache, and that nobody starves."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from priority_kit import step, world
from test_scheduler import BASE, prompt
from world import World, request

from mizzen.core import policies, preemption
from mizzen.core.kv.radix_cache import CachedPrefix
from mizzen.core.policies import MAX_OVERTAKES, POLICIES, REORDER_WINDOW
from mizzen.core.request import FinishReason, Request
from mizzen.core.sequence import SequenceState
from mizzen.core.waiting_queue import WaitingQueue


def make(serial: int, priority: int) -> SequenceState:
    asked = Request(rid=serial, prompt=np.array([1], np.int32), sampling=request(0, [1]).sampling)
    sequence = SequenceState(asked, serial, 9, frozenset())
    sequence.rank = priority
    return sequence


class Nothing:
    def cached_prefix(self, waiting: SequenceState) -> CachedPrefix:
        return CachedPrefix(None, None, 0)


@given(priorities=st.lists(st.tuples(st.integers(-2, 2), st.booleans()), max_size=40))
def test_queue_orders_by_priority_then_retraction_then_arrival(
    priorities: list[tuple[int, bool]],
) -> None:
    queue = WaitingQueue(POLICIES["priority"], 100)
    waiting = [make(serial, priority) for serial, (priority, _) in enumerate(priorities)]
    for sequence, (_, retracted) in zip(waiting, priorities, strict=True):
        (queue.requeue if retracted else queue.add)(sequence)
    order = sorted(waiting, key=lambda one: (-one.rank, not priorities[one.serial][1], one.serial))
    assert queue.admission_order(0, Nothing()) == list(queue) == order
    assert queue.head() is (order[0] if order else None)
    assert len(queue) == len(order)
    for sequence in order[::2]:
        queue.remove(sequence)
    assert list(queue) == order[1::2]
    assert queue.tokens == len(order[1::2])


def test_high_priority_request_is_found_after_a_long_queue() -> None:
    queue = WaitingQueue(POLICIES["priority"], 10_000)
    for serial in range(3 * REORDER_WINDOW):
        queue.add(make(serial, 0))
    late = make(9999, 1)
    queue.add(late)
    assert queue.admission_order(0, Nothing())[0] is late
    urgent = queue.admission_order(MAX_OVERTAKES, Nothing())
    assert urgent[0].serial == 0
    assert len(set(urgent)) == len(urgent)


def test_starved_request_is_found_after_a_retracted_one_that_is_not_starved() -> None:
    queue, (old, back, high) = WaitingQueue(POLICIES["priority"], 100), [make(n, n // 2) for n in range(3)]
    back.admissions_before = 10
    queue.add(old)
    queue.requeue(back)
    queue.add(high)
    assert queue.admission_order(MAX_OVERTAKES, Nothing()) == [old, high, back]


class Path:
    """What is cached of a request."""

    def __init__(self, nodes: str) -> None:
        self.nodes, self.pages = nodes, len(nodes)

    def path(self) -> list[str]:
        return [self.nodes[:end] for end in range(len(self.nodes) + 1)]


class Paths:
    """Requests below nodes of a made-up tree: each prompt is its path."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def cached_prefix(self, waiting: SequenceState) -> Path:
        return Path(self.paths[waiting.serial])


def test_dfs_weight_admits_heaviest_branches_first_and_contiguously() -> None:
    paths = ["b", "a", "ab", "b", "", "aa", "b", "bc", "ab"]
    policy = POLICIES["dfs-weight"]
    waiting = [make(serial, 0) for serial in range(len(paths))]
    order = [one.serial for one in policy(waiting, 0, Paths(paths))]
    # Below a 7 pages are saved, 4 of them below ab; below b 5.
    assert order == [2, 8, 5, 1, 7, 0, 3, 6, 4]
    waiting[4].admissions_before = -MAX_OVERTAKES
    assert next(iter(policy(waiting, 0, Paths(paths)))).serial == 4


@given(paths=st.lists(st.text("ab", max_size=4), max_size=30))
def test_dfs_weight_keeps_each_branch_contiguous(paths: list[str]) -> None:
    waiting = [make(serial, 0) for serial in range(len(paths))]
    order = [one.serial for one in POLICIES["dfs-weight"](waiting, 0, Paths(paths))]
    assert sorted(order) == list(range(len(paths)))
    for node in {path[:end] for path in paths for end in range(len(path) + 1)}:
        below = [place for place, serial in enumerate(order) if paths[serial].startswith(node)]
        assert below == list(range(below[0], below[-1] + 1))


def test_dfs_weight_order_reuses_cached_prefixes() -> None:
    """A cache that holds one prefix alone is not filled anew at each turn."""
    recomputed = {}
    for policy in ("fcfs", "dfs-weight"):
        here = World(
            dataclasses.replace(
                BASE, policy=policy, pages_total=20, max_running_requests=1, prefill_chunk_tokens=128
            )
        )
        heads = [prompt(56, 1), prompt(56, 2)]
        for rid, head in enumerate(heads, start=1):
            here.arrive(request(rid, [*head, 4], max_tokens=1))
            here.drain_running()
        for rid in range(3, 13):
            here.arrive(request(rid, [*heads[rid % 3 == 0], 5, rid % 12], max_tokens=1, ignore_eos=True))
        here.drain()
        recomputed[policy] = sum(len(chunk.tokens) for plan in here.plans for chunk in plan.prefill)
    assert recomputed["dfs-weight"] < 0.75 * recomputed["fcfs"]


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_policies_order_a_queue_longer_than_the_window(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patience = 12
    monkeypatch.setattr(policies, "MAX_OVERTAKES", patience)
    here = World(
        dataclasses.replace(
            BASE, policy=policy, pages_total=20, max_running_requests=1, prefill_chunk_tokens=128
        )
    )
    heads, count = [prompt(56, 1), prompt(56, 2)], 4 * patience
    for rid in range(count):
        here.arrive(request(rid, [*heads[rid % 2], 5, rid % 12], max_tokens=1, ignore_eos=True))
    here.drain()
    changes = sum(len(chunk.tokens) > 8 for plan in here.plans for chunk in plan.prefill)
    assert changes < count / patience + 2


@pytest.mark.parametrize("short", ["slots", "pages"])
@pytest.mark.parametrize("name", ["lpm", "dfs-weight"])
def test_queue_is_not_ordered_while_no_request_can_be_admitted(
    name: str, short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, calls = POLICIES[name], []

    def counted(*given: object) -> object:
        calls.append(given)
        return policy(*given)  # type: ignore[arg-type]

    monkeypatch.setitem(POLICIES, name, counted)
    room = {"max_running_requests": 1} if short == "slots" else {"pages_total": 20}
    here = World(dataclasses.replace(BASE, policy=name, prefill_chunk_tokens=64, **room))
    here.arrive(request(1, [4, 5, 6, 7] * 12, ignore_eos=True, max_tokens=20))
    here.launch()
    for rid in (2, 3, 4):
        here.arrive(request(rid, [8, rid, 9, 10] * 12, ignore_eos=True, max_tokens=3))
    here.launch()
    before = len(calls)
    for _ in range(12):
        here.collect()
        assert here.launch() is not None
    assert len(calls) == before
    here.drain()
    assert len(calls) > before
    assert all(end.reason is FinishReason.LENGTH for end in here.finished.values())


def test_victims_are_searched_only_if_lower_priorities_run(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def counted(head: SequenceState, *given: object, **named: object) -> list[SequenceState]:
        looks.append(head.rid)
        return choose_victims(head, *given, **named)  # type: ignore[arg-type]

    choose_victims = preemption.choose_victims
    monkeypatch.setattr(preemption, "choose_victims", counted)
    here = world(max_running_requests=1, prefill_chunk_tokens=64)
    here.arrive(request(1, prompt(8), ignore_eos=True, max_tokens=12, priority=1))
    here.launch()
    here.arrive(request(2, prompt(8, 2), ignore_eos=True, max_tokens=2))
    step(here, 5)
    assert looks == []
    here.arrive(request(3, prompt(8, 3), ignore_eos=True, max_tokens=2, priority=2))
    step(here, 4)
    assert set(looks) == {3}
    here.drain()


def test_priority_eviction_keeps_prefixes_of_high_priority_requests() -> None:
    cached = {}
    for eviction in ("lru", "priority"):
        here = World(dataclasses.replace(BASE, eviction=eviction, pages_total=40))
        here.arrive(request(1, prompt(40, 1), max_tokens=2, ignore_eos=True, priority=2))
        here.drain_running()
        for rid in range(2, 8):
            here.arrive(request(rid, prompt(40, rid), max_tokens=2, ignore_eos=True))
            here.drain_running()
        here.arrive(request(9, prompt(40, 1), max_tokens=2, ignore_eos=True))
        here.drain()
        cached[eviction] = here.finished[9].cached_tokens
    assert cached == {"lru": 0, "priority": 36}


def test_cost_of_the_queue_does_not_grow_with_the_number_of_priorities() -> None:
    queue, started = WaitingQueue(POLICIES["priority"], 100_000), time.perf_counter()
    for serial in range(20_000):
        queue.add(make(serial, serial * 7919 % 20_000))
    assert time.perf_counter() - started < 5  # it was 80 s when each new rank put all in order
    assert [one.rank for one in queue] == list(range(19_999, -1, -1))
