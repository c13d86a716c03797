# SPDX-License-Identifier: Apache-2.0
"""The fair queue of grammar compilations divides compile time and queue capacity between tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import grammar_kit as gk
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen.core.sampling_params import Grammar, GrammarKind
from mizzen.engine.shared_time_queue import SharedTimeQueue

COSTS = st.lists(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=12), min_size=1, max_size=6)


@given(COSTS)
def test_waiting_tenants_times_differ_by_at_most_one_item_of_each(
    costs: list[list[float]],
) -> None:
    turns: SharedTimeQueue[tuple[int, int]] = SharedTimeQueue()
    for tenant, items in enumerate(costs):
        for number in range(len(items)):
            turns.add_waiter(tenant, (tenant, number))
    used, remaining = [0.0] * len(costs), [len(items) for items in costs]
    while taken := turns.pop_next():
        tenant, (_, number) = taken
        assert number == len(costs[tenant]) - remaining[tenant], "items of one tenant are out of order"
        used[tenant] += costs[tenant][number]
        remaining[tenant] -= 1
        turns.charge(tenant, costs[tenant][number])
        waiting = [first for first, count in enumerate(remaining) if count]
        for first, second in product(waiting, waiting):
            assert abs(used[first] - used[second]) <= max(costs[first]) + max(costs[second]) + 1e-6
    assert not any(remaining)


@given(st.integers(1, 50), st.floats(0.001, 100.0))
def test_a_late_tenant_is_next_but_does_not_catch_up(flood: int, cost: float) -> None:
    turns: SharedTimeQueue[str] = SharedTimeQueue()
    for number in range(flood + 3):
        turns.add_waiter(1, f"flood {number}")
    for _ in range(flood):
        taken = turns.pop_next()
        assert taken is not None
        turns.charge(1, cost)
    for number in range(3):
        turns.add_waiter(2, f"late {number}")
    results = []
    while taken := turns.pop_next():
        results.append(taken[0])
        turns.charge(taken[0], cost)
    assert results[0] == 2
    assert sorted(results) == [1, 1, 1, 2, 2, 2]
    assert results != [2, 2, 2, 1, 1, 1], "it had nothing saved up"


def test_a_shared_item_is_popped_once_for_the_tenant_served_first() -> None:
    turns: SharedTimeQueue[str] = SharedTimeQueue()
    for item in ("a", "b", "shared"):
        turns.add_waiter(1, item)
    turns.charge(1, 5.0)
    turns.add_waiter(2, "shared")
    assert turns.pop_next() == (2, "shared")
    assert [turns.pop_next(), turns.pop_next(), turns.pop_next()] == [(1, "a"), (1, "b"), None]


def test_the_largest_tenant_gives_up_its_newest_item() -> None:
    turns: SharedTimeQueue[str] = SharedTimeQueue()
    assert turns.newest_of_largest(1) is None
    for item in ("a", "b", "c"):
        turns.add_waiter(1, item)
    assert turns.newest_of_largest(1) is None
    assert turns.newest_of_largest(2) == "c"
    turns.remove("c")
    turns.add_waiter(2, "x")
    assert turns.newest_of_largest(2) is None, "it would have as many itself"
    assert turns.newest_of_largest(3) == "b"


def test_idle_tenants_are_dropped() -> None:
    turns: SharedTimeQueue[int] = SharedTimeQueue()
    for tenant in range(10_000):
        turns.add_waiter(tenant, tenant)
        assert turns.pop_next() == (tenant, tenant)
    assert len(turns._tenants) < 5000


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


class WatchedCompiler:
    """A compiler with one worker; `order` lists the grammars that it has started to compile."""

    def __init__(self, folder: Path, **options: int) -> None:
        gk.save_tokenizer(folder)
        self.compiler, self.order = gk.compiler(folder, workers=1, **options), list[str]()
        self._compile, self.compiler._compile = self.compiler._compile, self._seen

    def _seen(self, grammar: Grammar, lane: Any) -> Any:
        self.order.append(grammar.text)
        return self._compile(grammar, lane)

    @contextmanager
    def flood_queue(self) -> Iterator[list[Grammar]]:
        """Queue four grammars of tenant 7 and start the first; none completes until the `with` block ends."""
        with self.compiler._sandbox._lock:
            flood = [regex(f"flood{number}") for number in range(4)]
            assert [self.compiler.find_or_compile(grammar, 7) for grammar in flood] == [None] * 4
            gk.wait(lambda: self.order)
            yield flood


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[..., WatchedCompiler]]:
    compilers: list[WatchedCompiler] = []

    def make(**options: int) -> WatchedCompiler:
        compilers.append(WatchedCompiler(tmp_path, **options))
        return compilers[-1]

    yield make
    for watched_compiler in compilers:
        watched_compiler.compiler.close()


def test_a_tenant_that_fills_the_queue_does_not_block_others(watched: Callable[..., WatchedCompiler]) -> None:
    watched_compiler = watched(max_waiting=4)
    with watched_compiler.flood_queue() as flood:
        assert watched_compiler.compiler.find_or_compile(regex("quick"), 8) is None
        away = watched_compiler.compiler.find_or_compile(flood[3], 7)
        assert away is not None
        assert away.temporary
        assert "of one key" in away.error
        rerun = watched_compiler.compiler.find_or_compile(flood[3], 7)
        assert rerun is not None
        assert rerun.temporary, "the tenant has most there already"
    for grammar in (*flood[:3], regex("quick")):
        assert gk.outcome(watched_compiler.compiler, grammar).grammar
    assert watched_compiler.order == ["flood0", "quick", "flood1", "flood2"]


def test_a_grammar_that_two_tenants_want_compiles_at_the_earlier_turn(
    watched: Callable[..., WatchedCompiler],
) -> None:
    watched_compiler = watched()
    with watched_compiler.flood_queue() as flood:
        assert watched_compiler.compiler.find_or_compile(flood[3], 8) is None
    for grammar in flood:
        assert gk.outcome(watched_compiler.compiler, grammar).grammar
    assert watched_compiler.order == ["flood0", "flood3", "flood1", "flood2"]
    assert watched_compiler.compiler.counts.compiled == 4
