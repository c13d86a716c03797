# SPDX-License-Identifier: Apache-2.0
"""The waiting queue: order of admission under each policy, cost, and search for requests to preempt."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from priority_kit import make_world, step
from test_scheduler import BASE, prompt
from world import World, request

from mizzen.core import policies, preemption
from mizzen.core.kv.radix_cache import CachedPrefix
from mizzen.core.policies import MAX_OVERTAKES, POLICIES, REORDER_WINDOW
from mizzen.core.request import FinishReason, Request
from mizzen.core.sequence import SequenceState
from mizzen.core.waiting_queue import WaitingQueue


def make_sequence(serial: int, priority: int) -> SequenceState:
    new_request = Request(rid=serial, prompt=np.array([1], np.int32), sampling=request(0, [1]).sampling)
    sequence = SequenceState(new_request, serial, 9, frozenset())
    sequence.rank = priority
    return sequence


class NothingCached:
    def cached_prefix(self, waiting: SequenceState) -> CachedPrefix:
        return CachedPrefix(None, None, 0)


@given(priorities=st.lists(st.tuples(st.integers(-2, 2), st.booleans()), max_size=40))
def test_queue_orders_by_priority_then_retraction_then_arrival(
    priorities: list[tuple[int, bool]],
) -> None:
    queue = WaitingQueue(POLICIES["priority"], 100)
    waiting = [make_sequence(serial, priority) for serial, (priority, _) in enumerate(priorities)]
    for sequence, (_, retracted) in zip(waiting, priorities, strict=True):
        (queue.requeue if retracted else queue.add)(sequence)
    order = sorted(
        waiting, key=lambda queued: (-queued.rank, not priorities[queued.serial][1], queued.serial)
    )
    assert queue.admission_order(0, NothingCached()) == list(queue) == order
    assert queue.head() is (order[0] if order else None)
    assert len(queue) == len(order)
    for sequence in order[::2]:
        queue.remove(sequence)
    assert list(queue) == order[1::2]
    assert queue.tokens == len(order[1::2])


def test_high_priority_request_is_found_after_a_long_queue() -> None:
    queue = WaitingQueue(POLICIES["priority"], 10_000)
    for serial in range(3 * REORDER_WINDOW):
        queue.add(make_sequence(serial, 0))
    high_priority = make_sequence(9999, 1)
    queue.add(high_priority)
    assert queue.admission_order(0, NothingCached())[0] is high_priority
    urgent = queue.admission_order(MAX_OVERTAKES, NothingCached())
    assert urgent[0].serial == 0
    assert len(set(urgent)) == len(urgent)


def test_starved_request_is_found_after_a_retracted_one_that_is_not_starved() -> None:
    queue, (starved, retracted, high) = (
        WaitingQueue(POLICIES["priority"], 100),
        [make_sequence(n, n // 2) for n in range(3)],
    )
    retracted.admissions_before = 10
    queue.add(starved)
    queue.requeue(retracted)
    queue.add(high)
    assert queue.admission_order(MAX_OVERTAKES, NothingCached()) == [starved, high, retracted]


class CachedPath:
    """The cached prefix of a request, as a path of one-letter nodes."""

    def __init__(self, nodes: str) -> None:
        self.nodes, self.pages = nodes, len(nodes)

    def path(self) -> list[str]:
        return [self.nodes[:end] for end in range(len(self.nodes) + 1)]


class CachedPaths:
    """A prefix cache in which the request with serial n has the cached path `paths[n]`."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def cached_prefix(self, waiting: SequenceState) -> CachedPath:
        return CachedPath(self.paths[waiting.serial])


def test_dfs_weight_admits_heaviest_branches_first_and_contiguously() -> None:
    paths = ["b", "a", "ab", "b", "", "aa", "b", "bc", "ab"]
    policy = POLICIES["dfs-weight"]
    waiting = [make_sequence(serial, 0) for serial in range(len(paths))]
    order = [sequence.serial for sequence in policy(waiting, 0, CachedPaths(paths))]
    # The requests below "a" save 7 pages, 4 of them below "ab"; those below "b" save 5.
    assert order == [2, 8, 5, 1, 7, 0, 3, 6, 4]
    waiting[4].admissions_before = -MAX_OVERTAKES
    assert next(iter(policy(waiting, 0, CachedPaths(paths)))).serial == 4


@given(paths=st.lists(st.text("ab", max_size=4), max_size=30))
def test_dfs_weight_keeps_each_branch_contiguous(paths: list[str]) -> None:
    waiting = [make_sequence(serial, 0) for serial in range(len(paths))]
    order = [sequence.serial for sequence in POLICIES["dfs-weight"](waiting, 0, CachedPaths(paths))]
    assert sorted(order) == list(range(len(paths)))
    for node in {path[:end] for path in paths for end in range(len(path) + 1)}:
        below = [place for place, serial in enumerate(order) if paths[serial].startswith(node)]
        assert below == list(range(below[0], below[-1] + 1))


def test_dfs_weight_order_reuses_cached_prefixes() -> None:
    """The cache has room for one of two prefixes; a good order of requests avoids recomputing prefixes."""
    recomputed = {}
    for policy in ("fcfs", "dfs-weight"):
        world = World(
            dataclasses.replace(
                BASE, policy=policy, pages_total=20, max_running_requests=1, prefill_chunk_tokens=128
            )
        )
        heads = [prompt(56, 1), prompt(56, 2)]
        for rid, head in enumerate(heads, start=1):
            world.arrive(request(rid, [*head, 4], max_tokens=1))
            world.run_until_idle()
        for rid in range(3, 13):
            world.arrive(request(rid, [*heads[rid % 3 == 0], 5, rid % 12], max_tokens=1, ignore_eos=True))
        world.drain()
        recomputed[policy] = sum(len(chunk.tokens) for plan in world.plans for chunk in plan.prefill)
    assert recomputed["dfs-weight"] < 0.75 * recomputed["fcfs"]


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_policies_order_a_queue_longer_than_the_window(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patience = 12
    monkeypatch.setattr(policies, "MAX_OVERTAKES", patience)
    world = World(
        dataclasses.replace(
            BASE, policy=policy, pages_total=20, max_running_requests=1, prefill_chunk_tokens=128
        )
    )
    heads, count = [prompt(56, 1), prompt(56, 2)], 4 * patience
    for rid in range(count):
        world.arrive(request(rid, [*heads[rid % 2], 5, rid % 12], max_tokens=1, ignore_eos=True))
    world.drain()
    changes = sum(len(chunk.tokens) > 8 for plan in world.plans for chunk in plan.prefill)
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
    limits = {"max_running_requests": 1} if short == "slots" else {"pages_total": 20}
    world = World(dataclasses.replace(BASE, policy=name, prefill_chunk_tokens=64, **limits))
    world.arrive(request(1, [4, 5, 6, 7] * 12, ignore_eos=True, max_tokens=20))
    world.launch()
    for rid in (2, 3, 4):
        world.arrive(request(rid, [8, rid, 9, 10] * 12, ignore_eos=True, max_tokens=3))
    world.launch()
    calls_before = len(calls)
    for _ in range(12):
        world.collect()
        assert world.launch() is not None
    assert len(calls) == calls_before
    world.drain()
    assert len(calls) > calls_before
    assert all(end.reason is FinishReason.LENGTH for end in world.finished.values())


def test_victims_are_searched_only_if_lower_priorities_run(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []

    def counted(head: SequenceState, *given: object, **named: object) -> list[SequenceState]:
        searches.append(head.rid)
        return choose_victims(head, *given, **named)  # type: ignore[arg-type]

    choose_victims = preemption.choose_victims
    monkeypatch.setattr(preemption, "choose_victims", counted)
    world = make_world(max_running_requests=1, prefill_chunk_tokens=64)
    world.arrive(request(1, prompt(8), ignore_eos=True, max_tokens=12, priority=1))
    world.launch()
    world.arrive(request(2, prompt(8, 2), ignore_eos=True, max_tokens=2))
    step(world, 5)
    assert searches == []
    world.arrive(request(3, prompt(8, 3), ignore_eos=True, max_tokens=2, priority=2))
    step(world, 4)
    assert set(searches) == {3}
    world.drain()


def test_priority_eviction_keeps_prefixes_of_high_priority_requests() -> None:
    cached = {}
    for eviction in ("lru", "priority"):
        world = World(dataclasses.replace(BASE, eviction=eviction, pages_total=40))
        world.arrive(request(1, prompt(40, 1), max_tokens=2, ignore_eos=True, priority=2))
        world.run_until_idle()
        for rid in range(2, 8):
            world.arrive(request(rid, prompt(40, rid), max_tokens=2, ignore_eos=True))
            world.run_until_idle()
        world.arrive(request(9, prompt(40, 1), max_tokens=2, ignore_eos=True))
        world.drain()
        cached[eviction] = world.finished[9].cached_tokens
    assert cached == {"lru": 0, "priority": 36}


def test_cost_of_the_queue_does_not_grow_with_the_number_of_priorities() -> None:
    queue, started = WaitingQueue(POLICIES["priority"], 100_000), time.perf_counter()
    for serial in range(20_000):
        queue.add(make_sequence(serial, serial * 7919 % 20_000))
    assert time.perf_counter() - started < 5  # 80 s if each new rank sorts the whole queue
    assert [sequence.rank for sequence in queue] == list(range(19_999, -1, -1))
