# SPDX-License-Identifier: Apache-2.0
"""Notation for cases of the rollout planner: a target, the existing groups, and the expected actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from mizzen_operator.pods.group import Group, GroupPod
from mizzen_operator.rollout.actions import Action, CreateGroup, RolloutTarget

STATES: Mapping[str, str] = {
    "starting": "its engine has never been ready",
    "ready": "its engine is ready, and no gateway knows it yet",
    "acknowledged": "every gateway has just begun to route to it",
    "serving": "every gateway routes to it",
    "stale": "its engine is no longer ready, and gateways have not noticed yet",
    "unready": "has served, and its engine is not ready",
    "partly_routed": "has served and is ready, but not every gateway routes to it",
    "unrouted": "has served and is ready, and no gateway routes to it: its readiness gate is closed",
    "crashing": "its container crashes again and again",
    "terminating": "its pod is being deleted",
    "ended": "will not run again",
    "backing_off": "ended a moment ago, before it ever served",
    "backing_off_terminating": "the same, and its pod is being deleted",
    "awaiting_verification": "ready, and has not answered its golden prompts yet",
    "misrouted": "the same, yet every gateway says that it routes to it",
    "failed_verification": "answered its golden prompts wrong",
    "reverified": "answered them wrong once, and right since",
    "mismatched": "has served, and no gateway speaks its protocol any more",
    "mismatched_serving": "the same, yet every gateway still routes to it",
    # Groups of three pods:
    "complete": "serves with all its pods",
    "partly_terminating": "has served, and one of its pods is being deleted",
    "incomplete": "has served, and one of its pods is gone",
    "partly_created": "its creation was interrupted before its last pod",
    "backing_off_incomplete": "ended a moment ago, before it ever served, and its leading pod is gone",
}
HAVE_SERVED = {"serving", "stale", "unready", "partly_routed", "unrouted", "mismatched", "mismatched_serving"}
ROUTED_BY_ALL = {"acknowledged", "serving", "stale", "misrouted", "mismatched_serving"}
BACKING_OFF = {"backing_off", "backing_off_terminating"}
NOT_READY = {"starting", "stale", "unready", "crashing", "terminating", "ended", *BACKING_OFF}
OF_THREE_PODS = {
    "complete": "serving",
    "partly_terminating": "serving",
    "incomplete": "serving",
    "partly_created": "starting",
    "backing_off_incomplete": "backing_off",
}
"""States of groups of three pods; the values are the states of their leading pods."""


TARGETS: Mapping[str, Mapping[str, Any]] = {
    "stable": {"stable_revision": "A", "can_restore": True},
    "paused": {"paused": True},
    "verified": {"verification_id": "prompts"},
    "verification_failed": {"verification_id": "prompts", "verification_failed": True},
    "pause_on_failure": {"pause_on_failure": True},
}
"""Words that a case's target may contain, with the `RolloutTarget` fields that each word sets.

A target may also set a single field by `field=value`.
"""


@dataclass(frozen=True)
class Case:
    """A case of the planner: its input and the expected actions.

    Attributes:
        name: the property that the case checks.
        target: number of groups, revision and `TARGETS`, such as `2 B stable max_surge=0`.
        groups: the groups and their `STATES`: in `A0 serving, B1-3 crashing` the second group is attempt 3 of
            index 1 of revision B.
        actions: the expected actions, in order: `-A0` deletes a group, `+B1-4` creates one. If the case also
            checks reasons, a reason follows each action, as in `-A0 Ended`.
    """

    name: str
    target: str
    groups: str
    actions: str

    @property
    def says_reasons(self) -> bool:
        """Whether the expected actions contain their reasons."""
        return " " in self.actions.split(", ")[0]


def read_cases(text: str) -> list[Case]:
    """Parse a table of cases, which have two lines each: the name, and `TARGET: GROUPS -> ACTIONS`.

    Lines that begin with `#` are comments. `none` stands for an empty list of groups or actions.
    """
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    cases: list[Case] = []
    for name, line in zip(lines[::2], lines[1::2], strict=True):
        target, _, rest = line.strip().partition(": ")
        groups, _, actions = rest.partition(" -> ")
        cases.append(Case(name, target, groups.replace("none", ""), actions.replace("none", "")))
    assert len({case.name for case in cases}) == len(cases)
    return cases


def parse_group(text: str) -> Group:
    """Parse a group and its state, such as `A0-1 serving`: revision A, index 0, attempt 1."""
    name, state = text.split()
    assert state in STATES
    if state in OF_THREE_PODS:
        return _group_of_three_pods(name, state)
    index, _, attempt = name[1:].partition("-")
    return Group(
        name=f"demo-{name[0]}-{index}-{attempt or 0}",
        uid=name,
        index=int(index),
        revision=name[0],
        attempt=int(attempt or 0),
        terminating=state in ("terminating", "backing_off_terminating"),
        ended=state == "ended" or state in BACKING_OFF,
        backing_off=state in BACKING_OFF,
        containers_ready=state not in NOT_READY,
        protocol_mismatch=state.startswith("mismatched"),
        awaiting_verification=state in ("awaiting_verification", "misrouted", "failed_verification"),
        failed_verification="prompts" if state in ("failed_verification", "reverified") else "",
        was_routable=state in HAVE_SERVED,
        routable=state in ("serving", "stale", "partly_routed"),
        reason="CrashLoopBackOff" if state == "crashing" else "",
    )


def _group_of_three_pods(name: str, state: str) -> Group:
    group = parse_group(f"{name} {OF_THREE_PODS[state]}")
    pods = [
        GroupPod(f"{group.name}{f'-{rank}' if rank else ''}", f"{name}/{rank}", rank) for rank in range(3)
    ]
    if state == "partly_terminating":
        pods[1] = replace(pods[1], terminating=True)
    elif state.endswith("incomplete"):
        del pods[0]
    elif state == "partly_created":
        del pods[2]
    return replace(
        group,
        size=3,
        members=tuple(pods),
        terminating=state == "partly_terminating",
        incomplete=state.endswith("incomplete"),
        containers_ready=state == "complete",
    )


def read_target(text: str) -> tuple[RolloutTarget, frozenset[str]]:
    """Parse a target; return it with the names that new pods must not have (`taken=NAME,NAME`)."""
    groups, revision, *words = text.split()
    fields: dict[str, Any] = {}
    taken = ""
    for word in words:
        name, _, value = word.partition("=")
        if name == "taken":
            taken = value
        elif not value:
            fields |= TARGETS[name]
        elif name == "abandoned":
            fields[name] = frozenset(map(int, value.split(",")))
        elif name == "can_restore":
            fields[name] = value == "True"
        else:
            fields[name] = int(value) if value.isdecimal() else value
    return RolloutTarget("demo", int(groups), revision, **fields), frozenset(filter(None, taken.split(",")))


@cache
def read_arguments(case: Case) -> tuple[RolloutTarget, list[Group], frozenset[str], frozenset[str]]:
    """Return the planner's arguments for a case: target, groups, UIDs of serving groups, taken names."""
    target, taken = read_target(case.target)
    texts = [text for text in case.groups.split(", ") if text]
    serving = frozenset(text.split()[0] for text in texts if text.split()[1] in ROUTED_BY_ALL)
    return target, [parse_group(text) for text in texts], serving, taken


def run(plan: Callable[..., list[Action]], case: Case, *, reverse: bool = False) -> str:
    """Run a planner on a case, and return the planned actions in the notation of `Case.actions`."""
    target, groups, serving, taken = read_arguments(case)
    actions = plan(target, groups[::-1] if reverse else groups, serving, taken)
    return ", ".join(
        f"{_shown(action)} {action.reason}" if case.says_reasons else _shown(action) for action in actions
    )


def _shown(action: Action) -> str:
    if not isinstance(action, CreateGroup):
        return f"-{action.uid}"
    revision, _, rest = action.name.removeprefix("demo-").partition("-")
    return f"+{revision}{rest.removesuffix('-0')}"


def holds(plan: Callable[..., list[Action]], case: Case) -> bool:
    """Return whether a planner plans the case's actions, for the groups in order and in reverse order."""
    return case.actions == run(plan, case) == run(plan, case, reverse=True)
