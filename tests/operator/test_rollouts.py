"""Rollouts under everything that can happen, with the machine of `rollout_machine.py`.

No mutant of the planner may survive: the table of its rules finds every one, and the machine those that break
what must always hold.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import plan_cases
from mizzen_operator import plan as planner
from rollout_machine import Plan, machine

Rollouts = machine(planner.plan)
TestRollouts = Rollouts.TestCase
TestRollouts.settings = settings(max_examples=150, stateful_step_count=40)

MUTANTS: Mapping[str, tuple[str, str]] = {
    "retires without a look at what is left": ("and (after >= enough or broken or stranger)", ""),
    "waits for what has broken": ("(after >= enough or broken or", "(after >= enough or"),
    "takes all at once that is not ready": ("and known > enough", ""),
    "waits for strangers": ("after >= enough or broken or stranger", "after >= enough or broken"),
    "takes strangers that serve": (
        "return group.stranger and group.uid not in serving",
        "return group.stranger",
    ),
    "takes what only some gateways route to for a stranger": (
        "return group.stranger and group.uid not in serving",
        "return group.containers_ready and group.uid not in serving",
    ),
    "lets strangers stand in for what may come back": (
        "if not _is_stranger(group, serving)]",
        "if True]",
    ),
    "takes others before strangers": ("            not _is_stranger(group, serving),\n", ""),
    "takes what nobody routes to for serving": (
        "if group.uid in serving and group.containers_ready)",
        "if group.containers_ready)",
    ),
    "makes more than the surge": (
        "places = wanted.groups + wanted.surge",
        "places = 1 + wanted.groups + wanted.surge",
    ),
    "supersedes what serves": (
        "if group.was_routable or group.uid in serving]\n    fresh",
        "if False]\n    fresh",
    ),
    "leaves half a group": ("if not group.live and group.left and", "if group.ended and group.left and"),
    "completes nothing": ("[*_completed(kept), *made]", "[*made]"),
    "makes new ones before what is restored": (
        "key=lambda one: one.revision == wanted.revision",
        "key=lambda one: one.revision != wanted.revision",
    ),
    "waits for what no gateway routes to": (
        "not (group.containers_ready and group.routable)",
        "not group.containers_ready",
    ),
    "takes what is ready while its gate is open": (
        "not (group.containers_ready and group.routable)",
        "True",
    ),
    "is kept from going back by a pause": ("(wanted.paused and known)", "wanted.paused"),
    "keeps an ended pod": ('*_deleted(ended, "Ended"),', ""),
    "restores nothing": ("if restorable else 0", "if False else 0"),
    "restores what was given up": ("and not (wanted.stable == wanted.revision and wanted.failed)", ""),
    "trusts a revision that never served": ("if not proven and known:", "if False:"),
    "uses a number twice": ("used = used | {index}", ""),
    "forgets its incarnations": ("max(seen, default=-1) + 1", "0"),
    "goes on when paused": ("if (wanted.paused and known) or (", "if ("),
    "knows no partition": ("aim = min(rest, wanted.groups - partition)", "aim = rest"),
    "retires none": ('*_deleted(replaced, "Replaced"),', ""),
    "tries what was given up": ("or (revision == wanted.revision and index in wanted.given_up)", ""),
    "goes on after what was given up": ("or (wanted.given_up and not proven)", ""),
    "makes anew what rests": ("- len(resting)\n    made", "\n    made"),
    "keeps what answered wrong": ('*_deleted(refused, "Refused"),', ""),
    "goes on with a refused revision": (
        "    if wanted.refused:\n        return _aims_refused",
        "    if False:\n        return _aims_refused",
    ),
    "pauses where it should roll back": (
        "if wanted.refused and wanted.keep_refused else",
        "if wanted.refused else",
    ),
    "lets surplus go without a look": (
        "if stay and (group.was_routable or group.uid in serving)]",
        "if False]",
    ),
}


def mutant(old: str, new: str) -> types.ModuleType:
    """A copy of the planner with one rule broken."""
    source = Path(planner.__file__).read_text()
    assert source.count(old) == 1, f"the planner has changed: {old!r}"
    module = types.ModuleType("mutant_plan")
    sys.modules[module.__name__] = module
    exec(compile(source.replace(old, new), "mutant_plan.py", "exec"), module.__dict__)
    return module


def passes_the_table(plan: Plan) -> bool:
    """Whether a planner does what the table of its rules says."""
    cases = [(wanted, {}, there, done) for _, wanted, there, done in plan_cases.CASES]
    cases += [case[1:] for case in plan_cases.ROLLOUTS]
    for wanted, given, there, done in cases:
        groups = [plan_cases.pod(text) for text in there]
        actions = plan(planner.Wanted("demo", *wanted, **given), groups, plan_cases.serving(there))
        names = [f"+{one.name}" if isinstance(one, planner.CreateGroup) else f"-{one.uid}" for one in actions]
        if names != done:
            return False
    return True


def test_the_planner_passes_the_table() -> None:
    assert passes_the_table(planner.plan)


@pytest.mark.parametrize("name", MUTANTS)
def test_no_mutant_of_the_planner_passes_the_table(name: str) -> None:
    assert not passes_the_table(mutant(*MUTANTS[name]).plan)


@pytest.mark.parametrize(
    "name",
    [
        "retires without a look at what is left",
        "makes more than the surge",
        "supersedes what serves",
        "keeps an ended pod",
        "knows no partition",
        "retires none",
        "waits for what has broken",
        "waits for strangers",
        "takes what only some gateways route to for a stranger",
    ],
)
def test_the_state_machine_finds_what_breaks_its_rules(name: str) -> None:
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
        run_state_machine_as_test(machine(mutant(*MUTANTS[name]).plan), settings=chosen)
