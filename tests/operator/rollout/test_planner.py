# SPDX-License-Identifier: Apache-2.0
"""The planner plans the expected actions in each case of its table; see also `test_planner_properties.py`."""

from __future__ import annotations

import pytest

from mizzen_operator.pods.group import is_backing_off
from mizzen_operator.rollout.actions import CreateGroup, DeleteGroup, RolloutTarget
from mizzen_operator.rollout.planner import plan
from plan_cases import Case, parse_group, run
from plan_table import CASES


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_planner_returns_the_actions_of_its_table(case: Case) -> None:
    assert run(plan, case) == case.actions
    assert run(plan, case, reverse=True) == case.actions, "the order of groups does not matter"


def test_only_the_pods_left_of_a_group_are_deleted_and_all_pods_of_its_replacement_are_created() -> None:
    actions = plan(RolloutTarget("demo", 1, "A"), [parse_group("A0 partly_terminating")], frozenset())
    deletion, creation = actions
    assert isinstance(deletion, DeleteGroup)
    assert deletion.pods == (("demo-A-0-0", "A0/0"), ("demo-A-0-0-2", "A0/2"))
    assert isinstance(creation, CreateGroup)
    assert creation.ranks == ()


def test_only_the_missing_pods_of_a_partly_created_group_are_created() -> None:
    [creation] = plan(RolloutTarget("demo", 1, "A"), [parse_group("A0 partly_created")], frozenset())
    assert isinstance(creation, CreateGroup)
    assert creation.ranks == (2,)


@pytest.mark.parametrize(
    ("attempt", "age", "expected"),
    [(0, 1, True), (0, 3, False), (3, 15, True), (3, 17, False), (500, 119, True), (500, 121, False)],
)
def test_the_back_off_doubles_with_each_attempt_up_to_a_limit(
    attempt: int, age: float, expected: bool
) -> None:
    assert is_backing_off(age, attempt) is expected
