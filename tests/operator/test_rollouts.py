"""Rollouts under everything that can happen, with the machine of `rollout_machine.py`.

The tests are tested, too: the table of the planner's rules kills every mutant of its source, and the machine
finds planners that break what must always hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import plan_cases
from mizzen_operator.pods.group import Group
from mizzen_operator.rollout import planner
from mizzen_operator.rollout.actions import Action, DeleteGroup, Wanted
from mutation import Subject
from rollout_machine import Plan, machine

Rollouts = machine(planner.plan)
TestRollouts = Rollouts.TestCase
TestRollouts.settings = settings(max_examples=150, stateful_step_count=40)


def passes_the_table(plan: Plan) -> bool:
    """Whether a planner does what the table of its rules says."""
    return all(plan_cases.holds(plan, case) for case in plan_cases.every())


def test_the_planner_passes_the_table() -> None:
    assert passes_the_table(planner.plan)


def test_no_mutant_of_the_planner_passes_the_table() -> None:
    subject = Subject(planner)
    survivors: list[str] = []
    for mutant in subject.mutants():
        with subject.applied(mutant) as module:
            try:
                survived = passes_the_table(module.plan)
            except Exception:  # whatever a mutant raises, it is found
                survived = False
        if survived:
            survivors.append(str(mutant))
    assert not survivors, "\n".join(
        ["add rows to plan_cases.py that tell these from the planner:", *survivors]
    )


Change = Callable[[Wanted, Group, frozenset[str]], Group]


def with_target(change: Callable[[Wanted], Wanted]) -> Plan:
    """The planner, asked for something else."""
    return lambda target, *rest: planner.plan(change(target), *rest)


def with_groups(change: Change) -> Plan:
    """The planner, shown other groups than there are."""

    def plan(
        target: Wanted, groups: Sequence[Group], serving: frozenset[str], *rest: frozenset[str]
    ) -> list[Action]:
        return planner.plan(target, [change(target, group, serving) for group in groups], serving, *rest)

    return plan


def without_deletions(reason: str) -> Plan:
    """The planner, without one of its rules that delete groups."""
    return lambda *given: [
        one for one in planner.plan(*given) if not (isinstance(one, DeleteGroup) and one.reason == reason)
    ]


def supersede(target: Wanted, group: Group, serving: frozenset[str]) -> Group:
    return replace(group, was_routable=group.was_routable and group.revision == target.revision)


def look_well(target: Wanted, group: Group, serving: frozenset[str]) -> Group:
    served = group.live and group.was_routable and group.revision != target.revision
    return replace(group, containers_ready=True, routable=True) if served else group


DEFECTS: Mapping[str, Plan] = {
    "retires groups while too few serve": with_target(
        lambda target: replace(target, unavailable=target.groups)
    ),
    "exceeds the surge": with_target(lambda target: replace(target, surge=target.surge + 1)),
    "ignores the partition": with_target(lambda target: replace(target, partition=0)),
    "supersedes groups that have served": lambda target, groups, serving, *rest: with_groups(supersede)(
        target,
        groups,
        frozenset(one.uid for one in groups if one.uid in serving and one.revision == target.revision),
        *rest,
    ),
    "keeps ended groups": without_deletions("Ended"),
    "retires no old group": without_deletions("Replaced"),
    "waits for old groups that have broken": with_groups(look_well),
    "waits for groups of another protocol": with_groups(lambda _, group, __: replace(group, stranger=False)),
    "takes a group that not every gateway routes to for one of another protocol": with_groups(
        lambda _, group, __: replace(group, stranger=group.containers_ready)
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
    assert not passes_the_table(DEFECTS[defect])
