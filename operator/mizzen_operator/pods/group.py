"""Groups: the pods of a service's engines → plain dataclasses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.pods.cold_start import NOT_STARTED, Start, read_start, whole
from mizzen_operator.pods.container_state import (
    CRASH_LOOP,
    DEVICE_LOST,
    FAILING_REASONS,
    device_lost,
    disruption,
    failed_first,
    trouble,
    unschedulable,
    waits_to_begin,
)


@dataclass(frozen=True, slots=True)
class Member:
    """One pod of a group of several.

    Attributes:
        rank: which of the group's pods; 0 leads.
    """

    name: str
    uid: str
    rank: int
    terminating: bool = False
    ready: bool = False
    node: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """One group: its leading pod, and what the others of its pods make of it.

    Where it has several pods, it is as well as the worst of them: it is ready when all are, and ends or goes
    when one does.

    Attributes:
        terminating: its pod is being deleted, or one of them is.
        ended: it will not run again, or should not, for its engine has lost its device.
        lost: a pod of it is gone that was there when it served, or led it.
        resting: it has ended before it ever served, and so soon that its replacement waits.
        containers_ready: its engine says that it is ready.
        was_routable: the gateways acknowledged it at some time.
        routable: the readiness gate's value now.
        problem: why a gateway does not route to it, as that gateway says.
        stranger: every gateway speaks another protocol than its engine: none will ever route to it.
        held: no gateway gives it requests, for it was not verified (yet).
        verified: it had to be verified, and was.
        refused_by: name of the verification that it failed last; empty when it failed none.
        refusal: what was wrong with its answer.
        waits: it has a node, and none of its containers was made yet.
        unschedulable: why no node takes it; empty when one did, or nobody has tried yet.
        reason: why its container waits or ended last, such as `Error`; `CrashLoopBackOff` from the first
            restart until it serves for the first time; empty when it runs well.
        message: what its container said about that, such as the termination message.
    """

    name: str
    uid: str
    group: int
    revision: str
    incarnation: int
    terminating: bool = False
    ended: bool = False
    resting: bool = False
    containers_ready: bool = False
    was_routable: bool = False
    routable: bool = False
    problem: str = ""
    stranger: bool = False
    held: bool = False
    verified: bool = False
    refused_by: str = ""
    refusal: str = ""
    node: str = ""
    waits: bool = False
    unschedulable: str = ""
    restarts: int = 0
    created: str = ""
    reason: str = ""
    message: str = ""
    lost: bool = False
    size: int = 1
    """Pods that it should have."""
    members: tuple[Member, ...] = ()
    """Its pods, where it should have several; those that are there."""
    start: Start = NOT_STARTED

    @property
    def live(self) -> bool:
        """It is there to stay."""
        return not (self.terminating or self.ended or self.lost)

    @property
    def routed(self) -> bool:
        """It gets requests now."""
        return self.live and self.routable and self.containers_ready

    @property
    def left(self) -> tuple[tuple[str, str], ...]:
        """Names and uids of its pods that nobody has deleted yet."""
        if self.size == 1:
            return () if self.terminating else ((self.name, self.uid),)
        return tuple((one.name, one.uid) for one in self.members if not one.terminating)

    @property
    def missing(self) -> tuple[int, ...]:
        """Which of its pods are not there."""
        if self.size == 1:
            return ()
        there = {one.rank for one in self.members}
        return tuple(rank for rank in range(self.size) if rank not in there)

    @property
    def failing(self) -> bool:
        """Its container cannot run as it is."""
        return self.ended or self.reason in FAILING_REASONS


FIRST_REST_SECONDS, MOST_REST_SECONDS = 2.0, 120.0


def rests(created: str, incarnation: int, now: datetime) -> bool:
    """Whether a pod that ended without ever having served was made too recently to be replaced.

    A node that turns pods away (no device left, an unfit host) does so at once, for ever: the pause doubles
    with each incarnation.
    """
    age = (now - datetime.fromisoformat(created)).total_seconds()
    return age < min(MOST_REST_SECONDS, FIRST_REST_SECONDS * 2 ** min(incarnation, 10))


def groups(service: str, pods: Sequence[Mapping[str, Any]]) -> tuple[Group, ...]:
    """Read a service's engine pods, in the order of their groups' first ones."""
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for pod in pods:
        given = pod["metadata"]["labels"]
        alone = given.get(labels.PODS, "1") == "1"
        names = (pod["metadata"]["name"],) if alone else tuple(given[name] for name in _GROUP_LABELS)
        found.setdefault(names, []).append(pod)
    return tuple(group(one[0]) if len(names) == 1 else gang(service, one) for names, one in found.items())


_GROUP_LABELS = (labels.REVISION, labels.GROUP_INDEX, labels.INCARNATION)


def gang(service: str, pods: Sequence[Mapping[str, Any]]) -> Group:
    """Read the pods of one group that should have several."""
    first = pods[0]["metadata"]["labels"]
    size = int(first[labels.PODS])
    ranked = sorted(
        ((int(pod["metadata"]["labels"][labels.RANK]), pod) for pod in pods), key=lambda one: one[0]
    )
    read = [(rank, group(pod), pod) for rank, pod in ranked]
    members = tuple(
        Member(one.name, one.uid, rank, one.terminating, one.containers_ready, one.node)
        for rank, one, _ in read
    )
    revision, number, incarnation = (first[name] for name in _GROUP_LABELS)
    leader = next((one for rank, one, _ in read if rank == 0), None)
    every = [one for _, one, _ in read]
    complete = len({rank for rank, *_ in read}) == size
    known = leader or replace(
        every[0],
        name=labels.pod_name(service, revision, int(number), int(incarnation)),
        was_routable=False,
        routable=False,
    )
    terminating, ended = any(one.terminating for one in every), any(one.ended for one in every)
    # Of a device that is lost one pod tells; the others say that the group was ended.
    troubled = min(
        (one for one in every if one.reason), key=lambda one: one.reason != DEVICE_LOST, default=None
    )
    away = next((one for one in every if one.unschedulable), None)
    created = min(one.created for one in every)
    return replace(
        known,
        terminating=terminating,
        ended=ended,
        resting=ended and not known.was_routable and rests(created, known.incarnation, datetime.now(UTC)),
        containers_ready=complete and all(one.containers_ready for one in every),
        node=known.node if complete and all(one.node for one in every) else "",
        waits=any(one.waits for one in every),
        unschedulable=f"{away.name}: {away.unschedulable}" if away else "",
        # Whatever fails, the group fails once: none of its pods is started again.
        restarts=int(not terminating and any(_failed(pod) for *_, pod in read)),
        created=created,
        reason=troubled.reason if troubled else "",
        message=troubled.message if troubled else "",
        lost=leader is None or (known.was_routable and not complete),
        size=size,
        members=members,
        start=whole([one.start for one in every]),
    )


def _failed(pod: Mapping[str, Any]) -> bool:
    """Whether a container of a pod has ended with an error."""
    states = [entry.get("state", {}) for entry in pod.get("status", {}).get("containerStatuses", [])]
    return any((state.get("terminated") or {}).get("exitCode", 0) for state in states)


def group(pod: Mapping[str, Any]) -> Group:
    """Read an engine's pod that is a group by itself."""
    meta, status = pod["metadata"], pod.get("status", {})
    conditions = {entry["type"]: entry for entry in status.get("conditions", [])}
    containers = status.get("containerStatuses", [])
    reason, message = trouble(status, [*failed_first(status), *containers])
    lost, counted = device_lost(containers)
    restarts = sum(entry.get("restartCount", 0) for entry in containers) + bool(lost and not counted)
    was_routable = labels.ROUTABLE in conditions
    if reason and reason not in FAILING_REASONS and restarts and not was_routable:
        reason = CRASH_LOOP  # also while its next try runs: it has failed so far
    if lost:
        reason, message = DEVICE_LOST, lost
    disrupted = conditions.get("DisruptionTarget", {})
    if disrupted.get("status") == "True":
        reason, message = disruption(pod, disrupted)
    ended = status.get("phase") in ("Failed", "Succeeded") or bool(lost)
    gates = {gate["conditionType"] for gate in pod["spec"].get("readinessGates", [])}
    verdict = conditions.get(labels.VERIFIED, {})
    verified = verdict.get("status") == "True"
    refused_by, refusal = read_refusal(verdict.get("message", "")) if verdict and not verified else ("", "")
    incarnation, created = int(meta["labels"][labels.INCARNATION]), meta.get("creationTimestamp", "")
    return Group(
        name=meta["name"],
        uid=meta["uid"],
        group=int(meta["labels"][labels.GROUP_INDEX]),
        revision=meta["labels"][labels.REVISION],
        incarnation=incarnation,
        terminating="deletionTimestamp" in meta,
        ended=ended,
        resting=ended and not was_routable and rests(created, incarnation, datetime.now(UTC)),
        containers_ready=conditions.get("ContainersReady", {}).get("status") == "True",
        was_routable=was_routable,
        routable=conditions.get(labels.ROUTABLE, {}).get("status") == "True",
        held=labels.VERIFIED in gates and not verified,
        verified=labels.VERIFIED in gates and verified,
        refused_by=refused_by,
        refusal=refusal,
        node=pod["spec"].get("nodeName", ""),
        waits=waits_to_begin(containers),
        unschedulable=unschedulable(conditions),
        restarts=restarts,
        created=created,
        reason=reason,
        message=message,
        start=read_start(pod),
    )


def write_refusal(verification: str, refusal: str) -> str:
    """The message of a pod's condition that a verification has failed."""
    return f"{verification}: {refusal}"


def read_refusal(message: str) -> tuple[str, str]:
    """The verification's name, and what was wrong."""
    verification, _, refusal = message.partition(": ")
    return verification, refusal
