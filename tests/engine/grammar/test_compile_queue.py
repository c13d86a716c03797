"""The fair queue of grammar compilations: tenants share its time and its places."""

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
from mizzen.engine.grammar.compile_queue import CompileQueue

COSTS = st.lists(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=12), min_size=1, max_size=6)


@given(COSTS)
def test_waiting_tenants_times_differ_by_at_most_one_item_of_each(
    costs: list[list[float]],
) -> None:
    turns: CompileQueue[tuple[int, int]] = CompileQueue()
    for tenant, items in enumerate(costs):
        for number in range(len(items)):
            turns.add_waiter(tenant, (tenant, number))
    used, left = [0.0] * len(costs), [len(items) for items in costs]
    while taken := turns.pop_next():
        tenant, (_, number) = taken
        assert number == len(costs[tenant]) - left[tenant], "a tenant's own go in order"
        used[tenant] += costs[tenant][number]
        left[tenant] -= 1
        turns.charge(tenant, costs[tenant][number])
        waiting = [one for one, count in enumerate(left) if count]
        for one, other in product(waiting, waiting):
            assert abs(used[one] - used[other]) <= max(costs[one]) + max(costs[other]) + 1e-6
    assert not any(left)


@given(st.integers(1, 50), st.floats(0.001, 100.0))
def test_a_late_tenant_is_next_but_does_not_catch_up(flood: int, cost: float) -> None:
    turns: CompileQueue[str] = CompileQueue()
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
    turns: CompileQueue[str] = CompileQueue()
    for item in ("a", "b", "shared"):
        turns.add_waiter(1, item)
    turns.charge(1, 5.0)
    turns.add_waiter(2, "shared")
    assert turns.pop_next() == (2, "shared")
    assert [turns.pop_next(), turns.pop_next(), turns.pop_next()] == [(1, "a"), (1, "b"), None]


def test_the_largest_tenant_gives_up_its_newest_item() -> None:
    turns: CompileQueue[str] = CompileQueue()
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
    turns: CompileQueue[int] = CompileQueue()
    for tenant in range(10_000):
        turns.add_waiter(tenant, tenant)
        assert turns.pop_next() == (tenant, tenant)
    assert len(turns._tenants) < 5000


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


class Watched:
    """A compiler with one worker, and the grammars that it compiles, in order."""

    def __init__(self, folder: Path, **options: int) -> None:
        gk.save_tokenizer(folder)
        self.compiler, self.order = gk.compiler(folder, workers=1, **options), list[str]()
        self._compile, self.compiler._compile = self.compiler._compile, self._seen

    def _seen(self, grammar: Grammar, lane: Any) -> Any:
        self.order.append(grammar.text)
        return self._compile(grammar, lane)

    @contextmanager
    def flooded(self) -> Iterator[list[Grammar]]:
        """Let tenant 7 request four grammars and start the first; nothing completes in the block."""
        with self.compiler._sandbox._lock:
            flood = [regex(f"flood{number}") for number in range(4)]
            assert [self.compiler.find_or_compile(one, 7) for one in flood] == [None] * 4
            gk.wait(lambda: self.order)
            yield flood


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def make(**options: int) -> Watched:
        made.append(Watched(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.compiler.close()


def test_a_tenant_that_fills_the_queue_does_not_block_others(watched: Callable[..., Watched]) -> None:
    it = watched(max_waiting=4)
    with it.flooded() as flood:
        assert it.compiler.find_or_compile(regex("quick"), 8) is None
        away = it.compiler.find_or_compile(flood[3], 7)
        assert away is not None
        assert away.temporary
        assert "of one key" in away.error
        rerun = it.compiler.find_or_compile(flood[3], 7)
        assert rerun is not None
        assert rerun.temporary, "the tenant has most there already"
    for one in (*flood[:3], regex("quick")):
        assert gk.outcome(it.compiler, one).grammar
    assert it.order == ["flood0", "quick", "flood1", "flood2"]


def test_a_grammar_that_two_tenants_want_compiles_at_the_earlier_turn(
    watched: Callable[..., Watched],
) -> None:
    it = watched()
    with it.flooded() as flood:
        assert it.compiler.find_or_compile(flood[3], 8) is None
    for one in flood:
        assert gk.outcome(it.compiler, one).grammar
    assert it.order == ["flood0", "flood3", "flood1", "flood2"]
    assert it.compiler.counts.compiled == 4
