"""The planner by the table of its rules. `test_rollouts.py` does to a service whatever can happen to it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mizzen_operator.actions import CreateGroup, DeleteGroup, Wanted
from mizzen_operator.groups import rests
from mizzen_operator.plan import plan
from plan_cases import CASES, ROLLOUTS, pod, serving


def act(
    wanted: tuple[int, str], there: list[str], taken: frozenset[str] = frozenset(), **rollout: Any
) -> list[str]:
    groups = [pod(text) for text in there]
    actions = plan(Wanted("demo", *wanted, **rollout), groups, serving(there), taken)
    return [f"+{a.name}" if isinstance(a, CreateGroup) else f"-{a.uid}" for a in actions]


@pytest.mark.parametrize(
    ("wanted", "rollout", "there", "done"), [c[1:] for c in ROLLOUTS], ids=[c[0] for c in ROLLOUTS]
)
def test_rollout(wanted: tuple[int, str], rollout: dict[str, Any], there: list[str], done: list[str]) -> None:
    assert act(wanted, there, **rollout) == done


@pytest.mark.parametrize(("wanted", "there", "done"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_rule(wanted: tuple[int, str], there: list[str], done: list[str]) -> None:
    assert act(wanted, there) == done


def test_a_name_that_is_taken_is_passed_over() -> None:
    taken = frozenset({"demo-A-0-0", "demo-A-0-1"})
    assert act((1, "A"), [], taken) == ["+demo-A-0-2"]


def test_of_several_pods_those_that_are_left_go_and_those_that_lack_come() -> None:
    half, new = plan(Wanted("demo", 1, "A"), [pod("A0-0 halved")], frozenset())
    assert isinstance(half, DeleteGroup)
    assert half.pods == (("demo-A-0-0", "A0-0/0"), ("demo-A-0-0-2", "A0-0/2"))
    assert isinstance(new, CreateGroup)
    assert new.ranks == ()
    [rest] = plan(Wanted("demo", 1, "A"), [pod("A0-0 begun")], frozenset())
    assert isinstance(rest, CreateGroup)
    assert rest.ranks == (2,)


def test_a_name_that_another_pod_of_the_group_cannot_have_is_passed_over() -> None:
    assert act((1, "A"), [], frozenset({"demo-A-0-0-1"})) == ["+demo-A-0-1"]


def test_what_gateways_say_of_a_pod_that_is_not_ready_counts_for_nothing() -> None:
    old, new = pod("A0-0 serving"), replace(pod("B1-0 serving"), containers_ready=False)
    assert plan(Wanted("demo", 1, "B"), [old, new], frozenset({"A0-0", "B1-0"})) == []


def test_what_gateways_say_of_a_pod_that_is_held_back_counts_for_nothing() -> None:
    groups = [pod("A0-0 serving"), pod("B1-0 held")]
    assert plan(Wanted("demo", 1, "B"), groups, frozenset({"A0-0", "B1-0"})) == []


@pytest.mark.parametrize(
    ("incarnation", "age", "expected"),
    [(0, 1, True), (0, 3, False), (3, 15, True), (3, 17, False), (500, 119, True), (500, 121, False)],
)
def test_the_rest_doubles_up_to_a_limit(incarnation: int, age: float, expected: bool) -> None:
    now = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
    assert rests(f"{now - timedelta(seconds=age):%Y-%m-%dT%H:%M:%SZ}", incarnation, now) is expected
