# SPDX-License-Identifier: Apache-2.0
"""Groups: a service's engine pods, read into plain values. Pure.

`pods/observe.py` reads the groups of a service. The planner, readiness gates and status use only these
values. A group is one pod, or several pods (one per node) that start, serve, fail and are deleted together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from mizzen_operator.api import child_names, labels, reasons
from mizzen_operator.pods.cold_start import (
    NOT_STARTED,
    StartupTimings,
    merge_startup_timings,
    read_startup_timings,
)
from mizzen_operator.pods.container_state import (
    FAILING_WAIT_REASONS,
    engine_containers,
    has_ended,
    is_creating_containers,
    order_by_relevance,
    read_configuration_error,
    read_device_loss,
    read_disruption,
    read_problem,
    unschedulable_message,
)
from mizzen_operator.resources.node_avoidance import read_avoided_nodes
from mizzen_operator.resources.option_fields import translate_engine_options

BACKOFF_BASE_SECONDS, BACKOFF_MAX_SECONDS = 2.0, 120.0
"""First and maximum back-off before the operator replaces a group that ended without having served.

The back-off doubles with each attempt.
"""
_IDENTITY_LABELS = (labels.REVISION, labels.GROUP_INDEX, labels.INCARNATION)
"""Labels whose values identify the group of a pod."""
NO_AGES: Mapping[str, float] = MappingProxyType({})
"""Ages of pods that this process sees for the first time."""


@dataclass(frozen=True, slots=True)
class GroupPod:
    """One pod of a multi-pod group.

    Attributes:
        rank: number of the pod in its group; 0 is the leader.
    """

    name: str
    uid: str
    rank: int
    terminating: bool = False
    ready: bool = False
    node: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """One group: the combined state of its pods.

    A multi-pod group is ready when all of its pods are ready, and it ends or terminates when one of them
    does.

    Attributes:
        name: name of the leading pod.
        uid: uid of the leading pod.
        index: the group's number, from 0.
        attempt: number of the attempt to run this index of this revision, from 0.
        terminating: a pod of the group is being deleted.
        ended: the group will not run again, or should not because its engine lost its device.
        backing_off: it ended without having served, so recently that its replacement has to wait.
        containers_ready: its engine reports that it is ready.
        was_routable: the readiness gate `mizzen.dev/routable` has been True at some time.
        routable: current value of the readiness gate `mizzen.dev/routable`.
        routing_error: a gateway's reason for not routing to it; empty if no gateway gives one.
        protocol_mismatch: every gateway speaks another protocol version than its engine, so none can ever
            route to it.
        awaiting_verification: it must pass its golden prompts before gateways send it requests.
        verified: it was subject to verification, and passed.
        failed_verification: id of the verification that it failed; empty if it failed none.
        verification_error: description of the wrong answer; empty if no answer was wrong.
        node: node of the leading pod; empty until all pods have a node.
        creating_containers: one of its pods has a node, but none of that pod's containers has been created.
        mounting_volumes: the node of one of its pods is still mounting volumes, or setting up the network.
        unschedulable: the scheduler's message if no node fits; empty if one fits or scheduling has not begun.
        restarts: number of restarts of its engine; for a multi-pod group, 1 once an engine has failed.
        avoided_nodes: nodes that its pods avoid because engines of the service lost their device there.
        lost_device_node: node on which its engine has just lost its device; empty if it has lost none.
        created: creation time of its first pod, by the clock of the API server.
        age: seconds since this process first saw one of its pods.
        reason: why a container is waiting, or why it last exited, such as `Error`; `CrashLoopBackOff` from
            the first restart until the group first serves; empty if all containers run well.
        message: message that belongs to `reason`, such as the container's termination message.
        incomplete: the leading pod is missing, or another pod is missing that existed when the group served.
        size: number of pods that it should have.
        members: its existing pods; empty for a single-pod group.
        startup: times at which it passed the stages of its start.
    """

    name: str
    uid: str
    index: int
    revision: str
    attempt: int
    terminating: bool = False
    ended: bool = False
    backing_off: bool = False
    containers_ready: bool = False
    was_routable: bool = False
    routable: bool = False
    routing_error: str = ""
    protocol_mismatch: bool = False
    awaiting_verification: bool = False
    verified: bool = False
    failed_verification: str = ""
    verification_error: str = ""
    node: str = ""
    creating_containers: bool = False
    mounting_volumes: bool = False
    unschedulable: str = ""
    restarts: int = 0
    avoided_nodes: tuple[str, ...] = ()
    lost_device_node: str = ""
    created: str = ""
    age: float = 0.0
    reason: str = ""
    message: str = ""
    incomplete: bool = False
    size: int = 1
    members: tuple[GroupPod, ...] = ()
    startup: StartupTimings = NOT_STARTED

    @property
    def live(self) -> bool:
        """Whether the group is neither terminating, ended nor incomplete."""
        return not (self.terminating or self.ended or self.incomplete)

    @property
    def routed(self) -> bool:
        """Whether gateways send it requests at present."""
        return self.live and self.routable and self.containers_ready

    @property
    def remaining_pods(self) -> tuple[tuple[str, str], ...]:
        """Names and uids of its pods that are not being deleted."""
        if self.size == 1:
            return () if self.terminating else ((self.name, self.uid),)
        return tuple((pod.name, pod.uid) for pod in self.members if not pod.terminating)

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks of its pods that do not exist."""
        if self.size == 1:
            return ()
        existing = {pod.rank for pod in self.members}
        return tuple(rank for rank in range(self.size) if rank not in existing)

    @property
    def failing(self) -> bool:
        """Whether it has ended, or has a container that will not run until something is changed."""
        return self.ended or self.misconfigured or self.reason in FAILING_WAIT_REASONS

    @property
    def misconfigured(self) -> bool:
        """Whether its engine exited because its configuration cannot work, however often it is restarted."""
        return self.reason == reasons.INVALID_CONFIGURATION


def is_backing_off(age: float, attempt: int) -> bool:
    """Return whether it is too early to replace a group that ended without having served.

    A node that rejects a pod (no free device, an unfit host) does so at once, and rejects its replacements
    too. So the back-off doubles with each attempt.

    Args:
        age: seconds since this process first saw the group.
        attempt: the group's attempt, from 0.
    """
    return age < min(BACKOFF_MAX_SECONDS, BACKOFF_BASE_SECONDS * 2 ** min(attempt, 10))


def read_groups(
    service: str, pods: Sequence[Mapping[str, Any]], ages: Mapping[str, float] = NO_AGES
) -> tuple[Group, ...]:
    """Read the groups of a service from its engine pods, in the order of their first pods in `pods`.

    Args:
        service: name of the service.
        pods: engine pods whose labels are valid.
        ages: seconds since this process first saw each pod, by uid; 0 for a pod that is missing.
    """
    by_group: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for pod in pods:
        pod_labels = pod["metadata"]["labels"]
        single = pod_labels.get(labels.PODS, "1") == "1"
        identity = (
            (pod["metadata"]["name"],) if single else tuple(pod_labels[label] for label in _IDENTITY_LABELS)
        )
        by_group.setdefault(identity, []).append(pod)
    return tuple(
        read_single_pod_group(members[0], ages)
        if len(identity) == 1
        else read_multi_pod_group(service, members, ages)
        for identity, members in by_group.items()
    )


def read_multi_pod_group(
    service: str, pods: Sequence[Mapping[str, Any]], ages: Mapping[str, float] = NO_AGES
) -> Group:
    """Read the pods of one multi-pod group.

    Args:
        service: name of the service.
        pods: the group's existing pods, at least one, in any order.
        ages: seconds since this process first saw each pod, by uid.
    """
    first_labels = pods[0]["metadata"]["labels"]
    size = int(first_labels[labels.PODS])
    ranked = sorted(
        ((int(pod["metadata"]["labels"][labels.RANK]), pod) for pod in pods), key=lambda entry: entry[0]
    )
    read = [(rank, read_single_pod_group(pod, ages), pod) for rank, pod in ranked]
    members = tuple(
        GroupPod(
            name=state.name,
            uid=state.uid,
            rank=rank,
            terminating=state.terminating,
            ready=state.containers_ready,
            node=state.node,
        )
        for rank, state, _ in read
    )
    revision, index, attempt = (first_labels[label] for label in _IDENTITY_LABELS)
    leader = next((state for rank, state, _ in read if rank == 0), None)
    states = [state for _, state, _ in read]
    complete = len({rank for rank, *_ in read}) == size
    base = leader or replace(
        states[0],
        name=child_names.leader_pod(service, revision, int(index), int(attempt)),
        was_routable=False,
        routable=False,
    )
    terminating, ended = any(state.terminating for state in states), any(state.ended for state in states)
    # The pod with the cause says so; the other pods only report that their group has ended.
    with_problem = min(
        (state for state in states if state.reason),
        key=lambda state: (state.reason != reasons.DEVICE_LOST, not state.misconfigured),
        default=None,
    )
    unschedulable = next((state for state in states if state.unschedulable), None)
    age = max(state.age for state in states)
    return replace(
        base,
        terminating=terminating,
        ended=ended,
        backing_off=ended and not base.was_routable and is_backing_off(age, base.attempt),
        containers_ready=complete and all(state.containers_ready for state in states),
        node=base.node if complete and all(state.node for state in states) else "",
        creating_containers=any(state.creating_containers for state in states),
        mounting_volumes=any(state.mounting_volumes for state in states),
        unschedulable=f"{unschedulable.name}: {unschedulable.unschedulable}" if unschedulable else "",
        # Pods of such a group are not restarted in place, so it fails once, however many of its pods fail.
        restarts=int(not terminating and any(_has_failed_engine(pod) for *_, pod in read)),
        lost_device_node=next(filter(None, (state.lost_device_node for state in states)), ""),
        created=min(state.created for state in states),
        age=age,
        reason=with_problem.reason if with_problem else "",
        message=with_problem.message if with_problem else "",
        incomplete=leader is None or (base.was_routable and not complete),
        size=size,
        members=members,
        startup=merge_startup_timings([state.startup for state in states]),
    )


def _has_failed_engine(pod: Mapping[str, Any]) -> bool:
    """Return whether the engine of a pod has exited with an error."""
    engines = engine_containers(pod.get("status", {}).get("containerStatuses", []))
    states = [container.get("state", {}) for container in engines]
    return any((state.get("terminated") or {}).get("exitCode", 0) for state in states)


def read_single_pod_group(pod: Mapping[str, Any], ages: Mapping[str, float] = NO_AGES) -> Group:
    """Read one engine pod as a single-pod group; `ages` is the argument of `read_groups`."""
    meta, status = pod["metadata"], pod.get("status", {})
    conditions = {entry["type"]: entry for entry in status.get("conditions", [])}
    containers = status.get("containerStatuses", [])
    reason, message = read_problem(status, order_by_relevance(status))
    device_loss, counted = read_device_loss(containers)
    restarts = sum(container.get("restartCount", 0) for container in engine_containers(containers))
    restarts += bool(device_loss and not counted)
    was_routable = labels.ROUTABLE in conditions
    if reason and reason not in FAILING_WAIT_REASONS and restarts and not was_routable:
        reason = reasons.CRASH_LOOP_BACK_OFF  # also during the next attempt, because each has failed so far
    if configuration_error := read_configuration_error(containers):
        reason, message = reasons.INVALID_CONFIGURATION, configuration_error
    if device_loss:
        reason, message = reasons.DEVICE_LOST, device_loss
    disruption = conditions.get("DisruptionTarget", {})
    if disruption.get("status") == "True":
        reason, message = read_disruption(pod, disruption)
    ended = has_ended(pod) or bool(device_loss)
    creating, sandbox = is_creating_containers(status), conditions.get("PodReadyToStartContainers", {})
    gates = {gate["conditionType"] for gate in pod["spec"].get("readinessGates", [])}
    verification = conditions.get(labels.VERIFIED, {})
    verified = verification.get("status") == "True"
    failed_verification, verification_error = (
        parse_verification_failure(verification.get("message", ""))
        if verification and not verified
        else ("", "")
    )
    attempt, age = int(meta["labels"][labels.INCARNATION]), ages.get(meta["uid"], 0.0)
    return Group(
        name=meta["name"],
        uid=meta["uid"],
        index=int(meta["labels"][labels.GROUP_INDEX]),
        revision=meta["labels"][labels.REVISION],
        attempt=attempt,
        terminating="deletionTimestamp" in meta,
        ended=ended,
        backing_off=ended and not was_routable and is_backing_off(age, attempt),
        containers_ready=conditions.get("ContainersReady", {}).get("status") == "True",
        was_routable=was_routable,
        routable=conditions.get(labels.ROUTABLE, {}).get("status") == "True",
        awaiting_verification=labels.VERIFIED in gates and not verified,
        verified=labels.VERIFIED in gates and verified,
        failed_verification=failed_verification,
        verification_error=verification_error,
        node=pod["spec"].get("nodeName", ""),
        creating_containers=creating,
        mounting_volumes=creating and sandbox.get("status") == "False",
        unschedulable=unschedulable_message(conditions),
        restarts=restarts,
        avoided_nodes=read_avoided_nodes(pod),
        lost_device_node=pod["spec"].get("nodeName", "") if device_loss else "",
        created=meta.get("creationTimestamp", ""),
        age=age,
        reason=reason,
        message=translate_engine_options(message),
        startup=read_startup_timings(pod),
    )


def format_verification_failure(verification: str, error: str) -> str:
    """Return the message of a pod's condition `mizzen.dev/verified` after a failed verification.

    Args:
        verification: id of the verification.
        error: description of the wrong answer.
    """
    return f"{verification}: {error}"


def parse_verification_failure(message: str) -> tuple[str, str]:
    """Return the id and error in a message written by `format_verification_failure`."""
    verification, _, error = message.partition(": ")
    return verification, error
