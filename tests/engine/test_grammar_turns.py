"""Whose grammar is compiled next: tenants share the time, and the room."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import grammar_kit as gk
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen.core.params import Grammar, GrammarKind
from mizzen.engine.grammar.turns import Turns

COSTS = st.lists(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=12), min_size=1, max_size=6)


@given(COSTS)
def test_while_two_tenants_wait_their_times_differ_by_no_more_than_an_item_of_each(
    costs: list[list[float]],
) -> None:
    turns: Turns[tuple[int, int]] = Turns()
    for tenant, items in enumerate(costs):
        for number in range(len(items)):
            turns.add(tenant, (tenant, number))
    used, left = [0.0] * len(costs), [len(items) for items in costs]
    while taken := turns.take():
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
def test_one_that_comes_late_is_next_and_does_not_catch_up(flood: int, cost: float) -> None:
    turns: Turns[str] = Turns()
    for number in range(flood + 3):
        turns.add(1, f"flood {number}")
    for _ in range(flood):
        taken = turns.take()
        assert taken is not None
        turns.charge(1, cost)
    for number in range(3):
        turns.add(2, f"late {number}")
    found = []
    while taken := turns.take():
        found.append(taken[0])
        turns.charge(taken[0], cost)
    assert found[0] == 2
    assert sorted(found) == [1, 1, 1, 2, 2, 2]
    assert found != [2, 2, 2, 1, 1, 1], "it had nothing saved up"


def test_an_item_of_two_tenants_is_taken_once_at_the_first_turn_of_either() -> None:
    turns: Turns[str] = Turns()
    for item in ("a", "b", "shared"):
        turns.add(1, item)
    turns.charge(1, 5.0)
    turns.add(2, "shared")
    assert turns.take() == (2, "shared")
    assert [turns.take(), turns.take(), turns.take()] == [(1, "a"), (1, "b"), None]


def test_room_is_taken_from_whoever_has_most() -> None:
    turns: Turns[str] = Turns()
    assert turns.surplus(1) is None
    for item in ("a", "b", "c"):
        turns.add(1, item)
    assert turns.surplus(1) is None
    assert turns.surplus(2) == "c"
    turns.remove("c")
    turns.add(2, "x")
    assert turns.surplus(2) is None, "it would have as many itself"
    assert turns.surplus(3) == "b"


def test_tenants_that_were_are_forgotten() -> None:
    turns: Turns[int] = Turns()
    for tenant in range(10_000):
        turns.add(tenant, tenant)
        assert turns.take() == (tenant, tenant)
    assert len(turns._tenants) < 5000


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def test_a_tenant_who_fills_the_queue_keeps_out_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gk.save_tokenizer(tmp_path)
    compiler = gk.compiler(tmp_path, workers=1, waiting=4)
    order: list[str] = []
    compile_one = compiler._compile

    def seen(grammar: Grammar, lane: Any) -> Any:
        order.append(grammar.text)
        return compile_one(grammar, lane)

    monkeypatch.setattr(compiler, "_compile", seen)
    try:
        with compiler._sandbox._lock:  # nothing is compiled as long as the test holds it
            flood = [regex(f"flood{number}") for number in range(4)]
            assert [compiler.find(one, 7) for one in flood] == [None] * 4
            gk.wait(lambda: order)
            assert compiler.find(regex("quick"), 8) is None
            away = compiler.find(flood[3], 7)
            assert away is not None
            assert away.passing
            assert "of one key" in away.fault
            again = compiler.find(flood[3], 7)
            assert again is not None
            assert again.passing, "the tenant has most there already"
        for one in (*flood[:3], regex("quick")):
            assert gk.outcome(compiler, one).grammar
        assert order == ["flood0", "quick", "flood1", "flood2"]
    finally:
        compiler.close()


def test_a_grammar_that_another_asks_for_too_has_the_earlier_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gk.save_tokenizer(tmp_path)
    compiler = gk.compiler(tmp_path, workers=1)
    order: list[str] = []
    compile_one = compiler._compile

    def seen(grammar: Grammar, lane: Any) -> Any:
        order.append(grammar.text)
        return compile_one(grammar, lane)

    monkeypatch.setattr(compiler, "_compile", seen)
    try:
        with compiler._sandbox._lock:
            flood = [regex(f"flood{number}") for number in range(4)]
            assert [compiler.find(one, 7) for one in flood] == [None] * 4
            gk.wait(lambda: order)
            assert compiler.find(flood[3], 8) is None
        for one in flood:
            assert gk.outcome(compiler, one).grammar
        assert order == ["flood0", "flood3", "flood1", "flood2"]
        assert compiler.counts.compiled == 4
    finally:
        compiler.close()
