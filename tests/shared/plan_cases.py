"""The planner's rules: what is wanted, what is there, and what is done. Checked by `test_plan.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from mizzen_operator.pods.group import Group, Member
from mizzen_operator.rollout.actions import Action, CreateGroup, Wanted


def pod(text: str) -> Group:
    """`A0-1 serving`: revision A, group 0, incarnation 1, and what it is.

    starting: never ready; ready: its engine is, no gateway has seen it; serving; lost: served, is not ready
    now; unheard: served and is ready, but not every gateway routes to it; shut: no gateway does; broken:
    crashes; ending; ended; resting: ended a moment ago, before it served; leaving: that, and it is being
    deleted; held: ready, and not verified; misrouted: that, yet every gateway says it routes to it; wrong: it
    answered wrong; cleared: it did, and was verified since;
    stranger: served, and no gateway speaks its protocol any more; disputed: that too, and all route to it. Of
    three pods each are: whole, and serving; halved: served, one of them is being deleted; robbed: served, one
    is gone; begun: the operator was kept from making all.
    """
    name, state = text.split()
    if state in GANGS:
        return gang(name, state)
    number, _, incarnation = name[1:].partition("-")
    served = state in ("serving", "lost", "unheard", "shut", "stranger", "disputed")
    return Group(
        name=f"demo-{name[0]}-{number}-{incarnation}",
        uid=name,
        group=int(number),
        revision=name[0],
        incarnation=int(incarnation),
        terminating=state in ("ending", "leaving"),
        ended=state in ("ended", "resting", "leaving"),
        resting=state in ("resting", "leaving"),
        containers_ready=state not in NOT_READY,
        stranger=state in ("stranger", "disputed"),
        held=state in ("held", "misrouted", "wrong"),
        refused_by="prompts" if state in ("wrong", "cleared") else "",
        was_routable=served,
        routable=state in ("serving", "unheard"),
        reason="CrashLoopBackOff" if state == "broken" else "",
    )


NOT_READY = ("starting", "lost", "broken", "ending", "ended", "resting", "leaving")
GANGS = ("whole", "halved", "robbed", "begun")


def serving(there: Iterable[str]) -> frozenset[str]:
    """Uids of the groups that every gateway routes to."""
    named = (text.split() for text in there)
    return frozenset(name for name, state in named if state in ("serving", "disputed", "misrouted"))


def gang(name: str, state: str) -> Group:
    """A group of three pods."""
    one = pod(f"{name} {'starting' if state == 'begun' else 'serving'}")
    members = [Member(f"{one.name}{f'-{rank}' if rank else ''}", f"{name}/{rank}", rank) for rank in range(3)]
    if state == "halved":
        members[1] = replace(members[1], terminating=True)
    elif state == "robbed":
        del members[0]
    elif state == "begun":
        del members[2]
    return replace(
        one,
        size=3,
        members=tuple(members),
        terminating=state == "halved",
        lost=state == "robbed",
        containers_ready=state == "whole",
    )


# the case; wanted groups and revision; what is there; what is done
CASES: list[tuple[str, tuple[int, str], list[str], list[str]]] = [
    ("nothing is there", (2, "A"), [], ["+demo-A-0-0", "+demo-A-1-0"]),
    ("all is well", (2, "A"), ["A0-0 serving", "A1-0 serving"], []),
    ("groups start", (2, "A"), ["A0-0 starting", "A1-0 ready"], []),
    ("scale up", (3, "A"), ["A0-0 serving"], ["+demo-A-1-0", "+demo-A-2-0"]),
    ("scale down takes the highest", (1, "A"), ["A0-0 serving", "A1-0 serving"], ["-A1-0"]),
    ("scale down takes what does not serve", (1, "A"), ["A0-0 starting", "A1-0 serving"], ["-A0-0"]),
    (
        "scale down takes what crashes first",
        (2, "A"),
        ["A0-0 ready", "A1-0 broken", "A2-0 serving"],
        ["-A1-0"],
    ),
    ("suspend", (0, "A"), ["A0-0 serving", "B1-0 serving"], ["-A0-0", "-B1-0"]),
    ("a pod is being deleted", (1, "A"), ["A0-0 ending"], ["+demo-A-0-1"]),
    ("and its replacement too", (1, "A"), ["A0-0 ending", "A0-1 ending"], ["+demo-A-0-2"]),
    ("a pod has ended", (1, "A"), ["A0-0 ended"], ["-A0-0", "+demo-A-0-1"]),
    ("a pod has ended at once", (2, "A"), ["A0-3 resting", "A1-0 serving"], []),
    ("only what is missing rests", (1, "A"), ["A0-0 resting", "A0-1 resting"], ["-A0-0"]),
    ("what ended at once keeps its place alone", (2, "A"), ["A0-0 resting"], ["+demo-A-1-0"]),
    ("nothing rests that is not wanted", (0, "A"), ["A0-0 resting"], ["-A0-0"]),
    ("nothing of an old revision rests", (1, "B"), ["A0-0 resting"], ["-A0-0", "+demo-B-0-0"]),
    ("a new revision that ends at once", (1, "B"), ["A0-0 serving", "B1-2 resting"], []),
    ("a pod of a gap is replaced", (2, "A"), ["A0-0 ending", "A1-0 serving"], ["+demo-A-0-1"]),
    ("a rollout begins with one more", (2, "B"), ["A0-0 serving", "A1-0 serving"], ["+demo-B-2-0"]),
    ("the new one starts", (1, "B"), ["A0-0 serving", "B1-0 starting"], []),
    ("the new one is ready, nobody routes to it", (1, "B"), ["A0-0 serving", "B1-0 ready"], []),
    ("the new one serves", (1, "B"), ["A0-0 serving", "B1-0 serving"], ["-A0-0"]),
    (
        "one of two is replaced",
        (2, "B"),
        ["A0-0 serving", "A1-0 serving", "B2-0 serving"],
        ["-A1-0"],
    ),
    ("the next one follows", (2, "B"), ["A0-0 serving", "A1-0 ending", "B2-0 serving"], ["+demo-B-1-0"]),
    ("the new one crashes", (1, "B"), ["A0-0 serving", "B1-0 broken"], []),
    ("the old one is lost for now", (1, "B"), ["A0-0 lost", "B1-0 starting"], []),
    ("the old one is unheard for now", (1, "B"), ["A0-0 unheard", "B1-0 starting"], []),
    ("no gateway answers", (1, "B"), ["A0-0 unheard", "B1-0 unheard"], []),
    ("a revert", (1, "A"), ["A0-0 serving", "B1-0 broken"], ["-B1-0"]),
    (
        "a third revision",
        (1, "C"),
        ["A0-0 serving", "B1-0 broken"],
        ["-B1-0", "+demo-C-1-0"],
    ),
    ("old ones that never served go first", (1, "B"), ["A0-0 starting"], ["-A0-0", "+demo-B-0-0"]),
    ("several pods are well", (1, "A"), ["A0-0 whole"], []),
    ("half a group is none", (1, "A"), ["A0-0 halved"], ["-A0-0", "+demo-A-0-1"]),
    ("nor is what lacks one", (1, "A"), ["A0-0 robbed"], ["-A0-0", "+demo-A-0-1"]),
    ("what was begun is completed", (1, "A"), ["A0-0 begun"], ["+demo-A-0-0"]),
    ("unless it goes", (1, "B"), ["A0-0 begun"], ["-A0-0", "+demo-B-0-0"]),
    (
        "scale up in a rollout",
        (3, "B"),
        ["A0-0 serving", "B1-0 starting"],
        ["+demo-B-2-0", "+demo-B-3-0"],
    ),
    (
        "scale down in a rollout",
        (1, "B"),
        ["A0-0 serving", "A1-0 serving", "A2-0 serving", "B3-0 starting"],
        ["-A2-0", "-A1-0"],
    ),
    ("scale up beside two that serve", (3, "A"), ["A0-0 serving", "A1-0 serving"], ["+demo-A-2-0"]),
    (
        "an ended group does not rest in a place that is taken",
        (1, "A"),
        ["A0-0 serving", "A1-0 resting"],
        ["-A1-0"],
    ),
    (
        "no ended group rests while there are too many",
        (0, "A"),
        ["A0-0 serving", "A1-0 resting", "A2-0 resting"],
        ["-A1-0", "-A2-0", "-A0-0"],
    ),
    ("an ended group that is being deleted does not rest", (1, "A"), ["A0-0 leaving"], ["+demo-A-0-1"]),
    ("the one that serves is the last to go", (1, "A"), ["A0-0 unheard", "A1-0 serving"], ["-A0-0"]),
    ("a crashing group goes before a starting one", (1, "A"), ["A0-0 broken", "A1-0 starting"], ["-A0-0"]),
    ("a group that is not ready goes before one that is", (1, "A"), ["A0-0 lost", "A1-0 ready"], ["-A0-0"]),
    (
        "a group that never served goes before one that has",
        (1, "A"),
        ["A0-0 starting", "A1-0 lost"],
        ["-A0-0"],
    ),
    ("of two with one number the later one goes", (1, "A"), ["A0-0 serving", "A0-1 serving"], ["-A0-1"]),
    ("a group awaiting verification replaces nothing", (1, "B"), ["A0-0 serving", "B1-0 misrouted"], []),
    ("a group awaiting verification stays without golden prompts", (1, "A"), ["A0-0 held"], []),
]


STABLE = {"stable": "A", "restorable": True}
NO_SURGE = {**STABLE, "surge": 0, "unavailable": 1}
FAST = {**STABLE, "surge": 2, "unavailable": 1}


VERIFIED = {"verification": "prompts"}
REFUSED = {**VERIFIED, "refused": True}
REFUSED_AND_KEPT = {**REFUSED, "keep_refused": True}


def given_up(*numbers: int) -> dict[str, Any]:
    return {**STABLE, "given_up": frozenset(numbers)}


# The same of a service whose stable revision is known to be A, with fields of spec.rollout.
ROLLOUTS: list[tuple[str, tuple[int, str], dict[str, Any], list[str], list[str]]] = [
    ("the first one is surplus", (2, "B"), STABLE, ["A0-0 serving", "A1-0 serving"], ["+demo-B-2-0"]),
    (
        "what is lost before the new one serves is restored",
        (2, "B"),
        STABLE,
        ["A0-0 serving", "A1-0 ending", "B2-0 broken"],
        ["+demo-A-1-1"],
    ),
    (
        "what is restored stays until the new one serves",
        (2, "B"),
        STABLE,
        ["A0-0 serving", "A1-1 starting", "B2-0 broken"],
        [],
    ),
    (
        "and goes when it does",
        (2, "B"),
        STABLE,
        ["A0-0 serving", "A1-1 starting", "B2-0 serving"],
        ["-A1-1", "+demo-B-1-0"],
    ),
    (
        "nothing is restored of what nobody knows",
        (2, "B"),
        {**STABLE, "restorable": False},
        ["A0-0 serving", "B2-0 starting"],
        ["+demo-B-1-0"],
    ),
    (
        "what is lost once the new one serves is made new",
        (2, "B"),
        STABLE,
        ["A0-0 serving", "A1-0 ending", "B2-0 serving"],
        ["+demo-B-1-0"],
    ),
    (
        "scale up before the new one serves",
        (3, "B"),
        STABLE,
        ["A0-0 serving", "B1-0 starting"],
        ["+demo-A-2-0", "+demo-A-3-0"],
    ),
    (
        "scale down before the new one serves",
        (1, "B"),
        STABLE,
        ["A0-0 serving", "A1-0 serving", "B2-0 starting"],
        ["-A1-0"],
    ),
    (
        "a group that answers wrong is replaced where others of the revision serve",
        (2, "B"),
        {**STABLE, "verification": "prompts"},
        ["A0-0 serving", "B1-0 serving", "B2-0 wrong"],
        ["-B2-0", "+demo-B-2-1"],
    ),
    (
        "by other prompts than those of now it is asked again",
        (2, "B"),
        {**STABLE, "verification": "others"},
        ["A0-0 serving", "A1-0 serving", "B2-0 wrong"],
        [],
    ),
    (
        "a refused revision goes, and the one before is restored",
        (2, "B"),
        {**STABLE, "verification": "prompts", "refused": True},
        ["A0-0 serving", "A1-0 ending", "B2-0 wrong", "B3-0 held"],
        ["-B2-0", "-B3-0", "+demo-A-1-1"],
    ),
    (
        "a refused revision goes though it was the first",
        (2, "B"),
        {"verification": "prompts", "refused": True},
        ["B0-0 wrong", "B1-0 starting"],
        ["-B0-0", "-B1-0"],
    ),
    ("and is not made again", (2, "B"), {"verification": "prompts", "refused": True}, [], []),
    (
        "a refused revision that pauses stays as it is",
        (2, "B"),
        {**STABLE, "verification": "prompts", "refused": True, "keep_refused": True},
        ["A0-0 serving", "A1-0 serving", "B2-0 wrong"],
        [],
    ),
    ("a revert", (2, "A"), STABLE, ["A0-0 serving", "A1-0 serving", "B2-0 serving"], ["-B2-0"]),
    (
        "a revert keeps what serves until enough do",
        (2, "A"),
        STABLE,
        ["A0-0 serving", "B1-0 serving", "B2-0 serving"],
        ["-B2-0"],
    ),
    (
        "a third revision takes the second's place first",
        (2, "C"),
        STABLE,
        ["A0-0 serving", "B1-0 serving", "C2-0 serving"],
        ["-B1-0"],
    ),
    (
        "old ones that have broken are mended by the new one",
        (2, "B"),
        STABLE,
        ["A0-0 lost", "A1-0 lost", "B2-0 serving"],
        ["-A1-0"],
    ),
    (
        "one after another, for they may come back",
        (2, "B"),
        STABLE,
        ["A0-0 lost", "A1-0 ending", "B2-0 serving"],
        ["+demo-B-1-0"],
    ),
    (
        "and no sooner than it serves",
        (2, "B"),
        STABLE,
        ["A0-0 lost", "A1-0 lost", "B2-0 starting"],
        [],
    ),
    (
        "old ones that no gateway routes to any more are mended by the new one too",
        (2, "B"),
        STABLE,
        ["A0-0 shut", "A1-0 shut", "B2-0 serving"],
        ["-A1-0"],
    ),
    ("and no sooner", (2, "B"), STABLE, ["A0-0 shut", "A1-0 shut", "B2-0 starting"], []),
    ("without surge one of them goes", (2, "B"), NO_SURGE, ["A0-0 shut", "A1-0 shut"], ["-A1-0"]),
    ("but not where it may be that none answers", (2, "B"), NO_SURGE, ["A0-0 unheard", "A1-0 unheard"], []),
    (
        "what is restored comes before what was begun",
        (2, "B"),
        STABLE,
        ["A0-0 whole", "A1-0 halved", "B2-0 begun"],
        ["-A1-0", "+demo-A-1-1", "+demo-B-2-0"],
    ),
    ("from nothing the old one comes first", (1, "B"), STABLE, [], ["+demo-A-0-0", "+demo-B-1-0"]),
    (
        "and where the last one is lost",
        (1, "B"),
        STABLE,
        ["A0-0 halved", "B1-0 begun"],
        ["-A0-0", "+demo-A-0-1", "+demo-B-1-0"],
    ),
    (
        "a pause keeps nobody from going back",
        (2, "A"),
        {**STABLE, "paused": True},
        ["A0-0 serving", "B2-0 serving"],
        ["+demo-A-1-0"],
    ),
    (
        "strangers stay until the new one serves, for the gateways may go back",
        (2, "B"),
        STABLE,
        ["A0-0 stranger", "A1-0 stranger", "B2-0 starting"],
        [],
    ),
    (
        "and go all at once then",
        (3, "B"),
        STABLE,
        ["A0-0 stranger", "A1-0 stranger", "A2-0 stranger", "B3-0 serving"],
        ["-A2-0", "-A1-0", "-A0-0"],
    ),
    (
        "without surge one goes at once",
        (2, "B"),
        NO_SURGE,
        ["A0-0 stranger", "A1-0 stranger"],
        ["-A1-0"],
    ),
    (
        "what only some gateways route to stays, and strangers go before it",
        (2, "B"),
        STABLE,
        ["A0-0 stranger", "A1-0 unheard", "B2-0 serving"],
        ["-A0-0"],
    ),
    (
        "as they do where one of both may go",
        (2, "B"),
        {**STABLE, "unavailable": 1, "partition": 1},
        ["A0-0 stranger", "A1-0 unheard", "B2-0 serving"],
        ["-A0-0"],
    ),
    (
        "no stranger that serves goes",
        (2, "B"),
        STABLE,
        ["A0-0 disputed", "A1-0 disputed", "B2-0 unheard"],
        [],
    ),
    (
        "for what is lost and may come back no stranger stands in",
        (2, "B"),
        STABLE,
        ["A0-0 lost", "A1-0 stranger", "B2-0 serving"],
        ["-A1-0"],
    ),
    ("a pause keeps strangers", (2, "B"), {**STABLE, "paused": True}, ["A0-0 stranger", "A1-0 stranger"], []),
    (
        "and so does a partition",
        (2, "B"),
        {**STABLE, "partition": 1},
        ["A0-0 stranger", "A1-0 stranger", "B2-0 serving"],
        ["-A1-0"],
    ),
    ("strangers of the wanted revision stay", (2, "A"), STABLE, ["A0-0 stranger", "A1-0 stranger"], []),
    (
        "strangers that are too many go at once",
        (2, "B"),
        {**STABLE, "partition": 2},
        ["A0-0 serving", "A1-0 starting", "B2-0 stranger"],
        ["-B2-0"],
    ),
    (
        "new ones that have broken give way to a partition",
        (2, "B"),
        {**STABLE, "partition": 2},
        ["A0-0 serving", "B1-0 lost", "B2-0 lost"],
        ["-B2-0", "+demo-A-2-0"],
    ),
    ("without surge one that has broken goes", (2, "B"), NO_SURGE, ["A0-0 lost", "A1-0 lost"], ["-A1-0"]),
    ("without surge an old one goes first", (2, "B"), NO_SURGE, ["A0-0 serving", "A1-0 serving"], ["-A1-0"]),
    ("then a new one comes", (2, "B"), NO_SURGE, ["A0-0 serving", "A1-0 ending"], ["+demo-B-1-0"]),
    ("no second one goes", (2, "B"), NO_SURGE, ["A0-0 serving", "B1-0 starting"], []),
    (
        "what is missing is not missing twice",
        (2, "B"),
        NO_SURGE,
        ["A0-0 lost", "A1-0 serving", "B2-0 starting"],
        ["-A0-0"],
    ),
    (
        "two more and one less",
        (4, "B"),
        FAST,
        ["A0-0 serving", "A1-0 serving", "A2-0 serving", "A3-0 serving"],
        ["+demo-B-4-0", "+demo-B-5-0", "-A3-0"],
    ),
    (
        "a partition stays",
        (3, "B"),
        {**STABLE, "partition": 2},
        ["A0-0 serving", "A1-0 serving", "B2-0 serving"],
        [],
    ),
    (
        "a lost one of the partition is restored",
        (3, "B"),
        {**STABLE, "partition": 2},
        ["A0-0 serving", "B2-0 serving"],
        ["+demo-A-1-0"],
    ),
    (
        "a partition that grows restores first",
        (3, "B"),
        {**STABLE, "partition": 2},
        ["A0-0 serving", "B1-0 serving", "B2-0 serving"],
        ["+demo-A-3-0"],
    ),
    (
        "and retires then",
        (3, "B"),
        {**STABLE, "partition": 2},
        ["A0-0 serving", "A3-0 serving", "B1-0 serving", "B2-0 serving"],
        ["-B2-0"],
    ),
    (
        "a partition of all",
        (2, "B"),
        {**STABLE, "partition": 9},
        ["A0-0 serving", "A1-0 serving", "B2-0 serving"],
        ["-B2-0"],
    ),
    (
        "nor does a revert",
        (2, "A"),
        {**STABLE, "partition": 2},
        ["A0-0 serving", "A1-0 serving", "B2-0 serving"],
        ["-B2-0"],
    ),
    ("the first rollout knows no partition", (2, "A"), {"partition": 2}, [], ["+demo-A-0-0", "+demo-A-1-0"]),
    ("nor a pause", (1, "A"), {"paused": True}, [], ["+demo-A-0-0"]),
    (
        "a pause",
        (2, "B"),
        {**STABLE, "paused": True},
        ["A0-0 serving", "A1-0 serving", "B2-0 serving"],
        ["-A1-0"],
    ),
    ("paused", (2, "B"), {**STABLE, "paused": True}, ["A0-0 serving", "B2-0 serving"], []),
    ("paused before it begins", (1, "B"), {**STABLE, "paused": True}, ["A0-0 serving"], []),
    (
        "scale up while paused",
        (3, "B"),
        {**STABLE, "paused": True},
        ["A0-0 serving", "B2-0 serving"],
        ["+demo-A-1-0"],
    ),
    (
        "scale down while paused",
        (1, "B"),
        {**STABLE, "paused": True},
        ["A0-0 serving", "B2-0 serving"],
        ["-A0-0"],
    ),
    (
        "a group that failed too often before any served",
        (2, "B"),
        given_up(2),
        ["A0-0 serving", "A1-0 serving", "B2-0 broken"],
        ["-B2-0"],
    ),
    (
        "the rollout stands still then, and the old ones are kept up",
        (2, "B"),
        given_up(2),
        ["A0-0 serving"],
        ["+demo-A-1-0"],
    ),
    (
        "nothing is restored of what was given up after a revert to it",
        (2, "A"),
        given_up(0, 1),
        ["B2-0 serving"],
        [],
    ),
    (
        "a group that failed too often beside others that serve",
        (3, "A"),
        given_up(1),
        ["A0-0 serving", "A1-0 broken", "A2-0 serving"],
        ["-A1-0"],
    ),
    (
        "others are still replaced, its number is not used",
        (3, "A"),
        given_up(1),
        ["A0-0 serving", "A2-0 ending"],
        ["+demo-A-2-1"],
    ),
    ("a scale-down keeps one that serves", (1, "A"), given_up(1), ["A0-0 serving"], []),
    (
        "what serves again after too many failures stays",
        (2, "A"),
        given_up(1),
        ["A0-0 serving", "A1-0 serving"],
        [],
    ),
    ("nothing is tried again", (3, "A"), given_up(1), ["A0-0 serving", "A2-0 serving"], []),
    (
        "a first rollout goes on beside a group that was given up",
        (2, "A"),
        {"given_up": frozenset({1})},
        [],
        ["+demo-A-0-0"],
    ),
    (
        "a group that was given up is not made under another number",
        (2, "B"),
        given_up(1),
        ["A0-0 serving", "B2-0 serving"],
        [],
    ),
    (
        "a group that was given up is not completed",
        (2, "B"),
        given_up(2),
        ["A0-0 serving", "A1-0 serving", "B2-0 begun"],
        ["-B2-0"],
    ),
    (
        "a group that was given up and is of a refused revision is deleted once",
        (1, "B"),
        {**given_up(1), **REFUSED},
        ["A0-0 serving", "B1-0 starting"],
        ["-B1-0"],
    ),
    (
        "an ended group of the stable revision rests in its place",
        (1, "B"),
        STABLE,
        ["A0-0 resting"],
        ["+demo-B-1-0"],
    ),
    (
        "a resting group of the stable revision takes up room of the surge",
        (2, "B"),
        STABLE,
        ["A3-0 resting"],
        ["+demo-A-0-0", "+demo-B-1-0"],
    ),
    (
        "a resting group of the new revision takes up room of the surge",
        (2, "B"),
        STABLE,
        ["B3-1 resting"],
        ["+demo-A-0-0", "+demo-A-1-0"],
    ),
    (
        "no stable group rests in the place of one that starts",
        (1, "B"),
        STABLE,
        ["A0-0 starting", "A1-0 resting", "B2-0 starting"],
        ["-A1-0"],
    ),
    (
        "no stable group rests in the place of one that serves",
        (1, "B"),
        STABLE,
        ["A0-0 serving", "A1-0 resting", "B2-0 starting"],
        ["-A1-0"],
    ),
    (
        "no more is restored than the surge has room for",
        (2, "B"),
        STABLE,
        ["B2-0 starting", "B3-0 starting"],
        ["+demo-A-0-0"],
    ),
    (
        "a starting group of a revision that is not the stable one goes",
        (2, "B"),
        STABLE,
        ["A0-0 serving", "B2-0 starting", "C1-0 starting"],
        ["-C1-0", "+demo-A-1-0"],
    ),
    (
        "of two groups being restored the better one stays",
        (1, "B"),
        STABLE,
        ["A0-0 starting", "A1-0 ready", "B2-0 starting"],
        ["-A0-0"],
    ),
    (
        "as many groups as are being restored may be",
        (2, "B"),
        STABLE,
        ["A0-0 starting", "A1-0 starting", "B2-0 starting"],
        [],
    ),
    (
        "no starting old group stays once the new revision serves",
        (1, "B"),
        STABLE,
        ["A0-0 serving", "A1-0 starting", "A2-0 starting", "B3-0 serving"],
        ["-A1-0", "-A2-0", "-A0-0"],
    ),
    (
        "groups of a third revision go before stable ones, each once",
        (2, "C"),
        STABLE,
        ["A0-0 serving", "B1-0 serving", "C2-0 serving", "C3-0 serving"],
        ["-B1-0", "-A0-0"],
    ),
    (
        "a surplus group that goes does not stand in for an old one",
        (1, "B"),
        STABLE,
        ["A0-0 shut", "B1-0 held", "B2-0 lost"],
        ["-B2-0"],
    ),
    (
        "a surplus group that never served makes room at once under a partition",
        (2, "B"),
        {**STABLE, "partition": 2},
        ["A0-0 serving", "A1-0 starting", "B2-0 starting"],
        ["-B2-0"],
    ),
    (
        "a starting surplus group does not count for one that serves",
        (1, "B"),
        STABLE,
        ["A0-0 serving", "B1-0 serving", "B2-0 starting"],
        ["-B2-0", "-A0-0"],
    ),
    (
        "scale down of new groups while paused",
        (1, "B"),
        {**STABLE, "paused": True},
        ["B0-0 serving", "B1-0 serving"],
        ["-B1-0"],
    ),
    (
        "a partition larger than the groups that must serve stays whole before the new revision serves",
        (2, "B"),
        {**STABLE, "unavailable": 1, "partition": 2},
        ["A0-0 serving", "A1-0 serving"],
        [],
    ),
    (
        "a refused revision that is kept has its former one restored",
        (2, "B"),
        {**STABLE, **REFUSED_AND_KEPT},
        ["A0-0 serving", "B2-0 wrong"],
        ["+demo-A-1-0"],
    ),
    (
        "nothing rests of a refused revision that is kept",
        (2, "B"),
        {"stable": "B", **REFUSED_AND_KEPT},
        ["B0-0 wrong", "B1-0 resting"],
        ["-B1-0"],
    ),
    (
        "nothing rests of a refused revision that has served",
        (2, "B"),
        {"stable": "B", **REFUSED},
        ["B0-0 serving", "B1-0 resting"],
        ["-B1-0"],
    ),
    ("a group of a refused revision that has served stays", (1, "B"), REFUSED, ["B0-0 serving"], []),
    (
        "a refused revision that has served is scaled down",
        (1, "B"),
        REFUSED,
        ["B0-0 serving", "B1-0 serving"],
        ["-B1-0"],
    ),
    (
        "a group that answered wrong once and was verified since stays",
        (1, "B"),
        VERIFIED,
        ["B0-0 cleared"],
        [],
    ),
]

# The same with names that no new pod may have, and the reason of each action.
REASONS: list[tuple[str, tuple[int, str], dict[str, Any], list[str], set[str], list[str]]] = [
    ("the first group", (1, "A"), {}, [], set(), ["+demo-A-0-0 Missing"]),
    ("a name that is taken", (1, "A"), {}, [], {"demo-A-0-0", "demo-A-0-1"}, ["+demo-A-0-2 Missing"]),
    (
        "a name that another pod of the group needs",
        (1, "A"),
        {},
        [],
        {"demo-A-0-0-1"},
        ["+demo-A-0-1 Missing"],
    ),
    ("an ended group", (1, "A"), {}, ["A0-0 ended"], set(), ["-A0-0 Ended", "+demo-A-0-1 Replaces"]),
    ("a group without all its pods", (1, "A"), {}, ["A0-0 begun"], set(), ["+demo-A-0-0 Incomplete"]),
    ("a starting group of another revision", (0, "B"), {}, ["A0-0 starting"], set(), ["-A0-0 Superseded"]),
    ("a group too many", (0, "A"), {}, ["A0-0 serving"], set(), ["-A0-0 Surplus"]),
    (
        "an old group once the new one serves",
        (1, "B"),
        STABLE,
        ["A0-0 serving", "B1-0 serving"],
        set(),
        ["-A0-0 Replaced"],
    ),
    (
        "an old group that is missing",
        (1, "B"),
        STABLE,
        ["B1-0 starting"],
        set(),
        ["+demo-A-0-0 Restored"],
    ),
    (
        "a group that failed too often",
        (1, "B"),
        given_up(1),
        ["A0-0 serving", "B1-0 broken"],
        set(),
        ["-B1-0 GivenUp"],
    ),
    (
        "any group of a refused revision that never served",
        (1, "B"),
        {**STABLE, **REFUSED},
        ["A0-0 serving", "B1-0 starting"],
        set(),
        ["-B1-0 Refused"],
    ),
]


@dataclass(frozen=True)
class Case:
    """One row of the tables.

    Attributes:
        name: what must hold.
        wanted: groups and revision.
        rollout: further fields of what the planner is asked for.
        there: the groups, as `pod` reads them.
        taken: names that no new pod may have.
        done: actions in their order, as `actions` shows them.
        reasons: the reasons of actions belong to what must hold.
    """

    name: str
    wanted: tuple[int, str]
    rollout: dict[str, Any]
    there: list[str]
    taken: frozenset[str]
    done: list[str]
    reasons: bool


def every() -> list[Case]:
    """The rows of all tables."""
    rows = [Case(name, wanted, {}, there, frozenset(), done, False) for name, wanted, there, done in CASES]
    rows += [Case(*row[:4], frozenset(), row[4], False) for row in ROLLOUTS]
    return [*rows, *(Case(*row[:4], frozenset(row[4]), row[5], True) for row in REASONS)]


def holds(plan: Callable[..., list[Action]], case: Case) -> bool:
    """Whether a planner does what a row says, whatever the order of groups."""
    return case.done == actions(plan, case) == actions(plan, replace(case, there=case.there[::-1]))


def actions(plan: Callable[..., list[Action]], case: Case) -> list[str]:
    """What a planner does in a case: `+name` of a group that it makes, `-uid` of one that it deletes."""
    wanted = Wanted("demo", *case.wanted, **case.rollout)
    found = plan(wanted, [pod(text) for text in case.there], serving(case.there), case.taken)
    names = [f"+{one.name}" if isinstance(one, CreateGroup) else f"-{one.uid}" for one in found]
    return [f"{name} {one.reason}" for name, one in zip(names, found, strict=True)] if case.reasons else names
