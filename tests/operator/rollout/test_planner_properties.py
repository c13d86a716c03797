# SPDX-License-Identifier: Apache-2.0
"""The planner in random rollouts with faults, which the state machine of `rollout_machine.py` generates.

The tests are tested as well: the table of the planner's rules kills every mutant of the planner, and the
state machine detects planners that violate its invariants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from mizzen_operator.pods.group import Group
from mizzen_operator.rollout import planner
from mizzen_operator.rollout.actions import Action, DeleteGroup, RolloutTarget
from mutation import Mutant, Subject
from plan_cases import holds
from plan_table import CASES
from rollout_machine import Plan, machine

TestRollouts = machine(planner.plan).TestCase
TestRollouts.settings = settings(max_examples=150, stateful_step_count=40)
UNLIMITED = 1 << 30


def test_the_planner_passes_the_table() -> None:
    assert all(holds(planner.plan, case) for case in CASES)


def test_the_table_kills_every_mutant_of_the_planner() -> None:
    subject = Subject(planner)
    cases = list(CASES)

    def survives(mutant: Mutant) -> bool:
        with subject.applied(mutant) as module:
            for case in cases:
                try:
                    passed = holds(module.plan, case)
                except Exception:
                    passed = False
                if not passed:
                    cases.remove(case)
                    cases.insert(0, case)  # it often kills the next mutant as well
                    return False
        return True

    survivors = [str(mutant) for mutant in subject.mutants() if survives(mutant)]
    assert not survivors, "\n".join(["add cases to plan_table.py that kill these mutants:", *survivors])


def with_target(change: Callable[[RolloutTarget], RolloutTarget]) -> Plan:
    """Return a defective planner: the real one with its target replaced by `change(target)`."""
    return lambda target, *rest: planner.plan(change(target), *rest)


def without_deletions(dropped: Callable[[DeleteGroup, Group], bool]) -> Plan:
    """Return a defective planner: the real one without the deletions for which `dropped` returns True."""

    def plan(target: RolloutTarget, groups: Sequence[Group], *rest: frozenset[str]) -> list[Action]:
        by_uid = {group.uid: group for group in groups}
        return [
            action
            for action in planner.plan(target, groups, *rest)
            if not (isinstance(action, DeleteGroup) and dropped(action, by_uid[action.uid]))
        ]

    return plan


def with_extra_deletion(candidate: Callable[[Group, bool], bool], spare: int = 0) -> Plan:
    """Return a defective planner: the real one with one more deletion of an outdated group.

    Args:
        candidate: returns whether to delete a group; its second argument is whether the group serves.
        spare: number of groups that must serve in addition to `min_available`; if fewer serve, there is no
            extra deletion.
    """

    def plan(
        target: RolloutTarget, groups: Sequence[Group], serving: frozenset[str], *rest: frozenset[str]
    ) -> list[Action]:
        actions = planner.plan(target, groups, serving, *rest)
        deleted = {action.uid for action in actions if isinstance(action, DeleteGroup)}
        if len(serving - deleted) < target.min_available + spare:
            return actions
        extra = [
            DeleteGroup(group.name, group.uid, "Replaced", group.remaining_pods)
            for group in sorted(groups, key=lambda group: group.name)
            if group.live and group.revision != target.revision and group.uid not in deleted
            if candidate(group, group.uid in serving)
        ]
        return [*actions, *extra[:1]]

    return plan


DEFECTS: Mapping[str, Plan] = {
    "retires groups while too few serve": with_target(
        lambda target: replace(target, max_unavailable=target.groups)
    ),
    "exceeds the surge": with_target(lambda target: replace(target, max_surge=target.max_surge + 1)),
    "retires groups of a partition": with_extra_deletion(lambda _, serves: serves, spare=1),
    "retires a serving group that must be available": with_extra_deletion(lambda _, serves: serves),
    "retires a partly routed group": with_extra_deletion(
        lambda group, serves: (
            group.routable and group.containers_ready and not (serves or group.protocol_mismatch)
        ),
        spare=-UNLIMITED,
    ),
    "keeps ended groups": without_deletions(lambda action, _: action.reason == "Ended"),
    "retires no outdated group": without_deletions(lambda action, _: action.reason == "Replaced"),
    "waits for unready outdated groups": without_deletions(
        lambda action, group: action.reason == "Replaced" and not group.containers_ready
    ),
    "waits for groups with a protocol mismatch": without_deletions(
        lambda action, group: action.reason == "Replaced" and group.protocol_mismatch
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_state_machine_finds_a_planner_that(defect: str) -> None:
    chosen = settings(
        max_examples=1500,
        stateful_step_count=40,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(machine(DEFECTS[defect]), settings=chosen)


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_table_finds_a_planner_that(defect: str) -> None:
    assert not all(holds(DEFECTS[defect], case) for case in CASES)
