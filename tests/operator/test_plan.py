"""The planner by the table of its rules. `test_rollouts.py` does to a service whatever can happen to it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

import plan_cases
from mizzen_operator.pods.group import rests
from mizzen_operator.rollout.actions import CreateGroup, DeleteGroup, Wanted
from mizzen_operator.rollout.planner import plan
from plan_cases import pod

CASES = plan_cases.every()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_rule(case: plan_cases.Case) -> None:
    assert plan_cases.actions(plan, case) == case.done
    assert plan_cases.holds(plan, case), "the order of groups changes nothing"


def test_of_several_pods_those_that_are_left_go_and_those_that_lack_come() -> None:
    half, new = plan(Wanted("demo", 1, "A"), [pod("A0-0 halved")], frozenset())
    assert isinstance(half, DeleteGroup)
    assert half.pods == (("demo-A-0-0", "A0-0/0"), ("demo-A-0-0-2", "A0-0/2"))
    assert isinstance(new, CreateGroup)
    assert new.ranks == ()
    [rest] = plan(Wanted("demo", 1, "A"), [pod("A0-0 begun")], frozenset())
    assert isinstance(rest, CreateGroup)
    assert rest.ranks == (2,)


def test_what_gateways_say_of_a_pod_that_is_not_ready_counts_for_nothing() -> None:
    old, new = pod("A0-0 serving"), replace(pod("B1-0 serving"), containers_ready=False)
    assert plan(Wanted("demo", 1, "B"), [old, new], frozenset({"A0-0", "B1-0"})) == []


@pytest.mark.parametrize(
    ("incarnation", "age", "expected"),
    [(0, 1, True), (0, 3, False), (3, 15, True), (3, 17, False), (500, 119, True), (500, 121, False)],
)
def test_the_rest_doubles_up_to_a_limit(incarnation: int, age: float, expected: bool) -> None:
    now = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
    assert rests(f"{now - timedelta(seconds=age):%Y-%m-%dT%H:%M:%SZ}", incarnation, now) is expected
