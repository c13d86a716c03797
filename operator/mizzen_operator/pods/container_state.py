"""State of a pod's containers: waiting, crash looping, unschedulable, disrupted, without its device. Pure.

Called for engine pods, gateway pods and the pods that fetch models. Messages prefer the container's own
termination message over the kubelet's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from mizzen_operator.api import labels, reasons
from mizzen_operator.pods.termination_cause import MESSAGE_PREFIXES

FAILING_WAIT_REASONS = frozenset(
    {
        reasons.CRASH_LOOP_BACK_OFF,
        reasons.CREATE_CONTAINER_CONFIG_ERROR,
        reasons.CREATE_CONTAINER_ERROR,
        reasons.ERR_IMAGE_NEVER_PULL,
        reasons.ERR_IMAGE_PULL,
        reasons.IMAGE_PULL_BACK_OFF,
        reasons.INVALID_IMAGE_NAME,
        reasons.RUN_CONTAINER_ERROR,
    }
)
"""Reasons of waiting containers that cannot run as they are."""
NODE_LOST_REASONS = frozenset({reasons.DELETION_BY_TAINT_MANAGER, reasons.DELETION_BY_POD_GC})
"""Reasons of a pod's DisruptionTarget condition that mean an unreachable or removed node."""
CRASH_LOOP_SECONDS = 600.0
"""Run time after which an exit is not part of a crash loop; the kubelet resets its back-off then, too."""


def read_device_loss(containers: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """Return an engine's message about its lost device, and whether `restartCount` counts that exit.

    The message is empty if no device was lost, or if the engine was restarted since and is ready.
    """
    for container in containers:
        current, previous = (container.get(state, {}).get("terminated") for state in ("state", "lastState"))
        terminated = current or previous or {}
        is_engine = container.get("name") == labels.ENGINE
        if is_engine and terminated.get("exitCode") == labels.DEVICE_LOST_CODE:
            message = (
                terminated.get("message") or f"the engine has lost its device ({_exit_code(terminated)})"
            )
            return ("", True) if container.get("ready") else (message.strip(), current is None)
    return "", True


def read_disruption(pod: Mapping[str, Any], condition: Mapping[str, Any]) -> tuple[str, str]:
    """Return reason and message of a disruption: the removal of a pod by something other than its owner.

    Args:
        pod: the pod.
        condition: its condition DisruptionTarget.
    """
    reason, node = condition.get("reason", ""), pod["spec"].get("nodeName", "")
    if reason not in NODE_LOST_REASONS:
        return reason or reasons.DISRUPTED, condition.get("message", "")
    message = (
        f"node {node} is lost, and a group elsewhere takes its place; the pod goes once the node is back"
    )
    return reasons.NODE_LOST, f"{message} or removed ({condition.get('message', '')})"


def read_problem(status: Mapping[str, Any], containers: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return reason and message of the first container that does not run; two empty strings if all run.

    Args:
        status: the pod's status; its own reason counts if no container has one.
        containers: the container statuses to check, in order of preference.
    """
    for container in containers:
        state, previous = container.get("state", {}), container.get("lastState", {})
        terminated = state.get("terminated") or previous.get("terminated") or {}
        waiting = state.get("waiting") or {}
        if waiting.get("reason") == reasons.CRASH_LOOP_BACK_OFF:  # the kubelet's message is only the delay
            return reasons.CRASH_LOOP_BACK_OFF, _exit_message(terminated) or waiting.get("message", "")
        if waiting.get("reason") in FAILING_WAIT_REASONS:
            return waiting["reason"], waiting.get("message") or _exit_message(terminated)
        if state.get("terminated") or (terminated and not container.get("ready")):
            return terminated.get("reason", reasons.ERROR), _exit_message(terminated)
    if status.get("phase") == "Failed":
        return status.get("reason", reasons.FAILED), status.get("message", "")
    return "", ""


def is_crash_looping(containers: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a container cannot run, or exits repeatedly soon after its start.

    This also holds while the next attempt runs. A single exit is not a crash loop, and neither is an exit
    after `CRASH_LOOP_SECONDS`.
    """

    def fails(container: Mapping[str, Any]) -> bool:
        state, previous = container.get("state", {}), container.get("lastState", {})
        if (state.get("waiting") or {}).get("reason") in FAILING_WAIT_REASONS:
            return True
        terminated = state.get("terminated") or previous.get("terminated")
        restarted = container.get("restartCount", 0) > 1
        return bool(terminated) and restarted and _seconds_run(terminated) < CRASH_LOOP_SECONDS

    return any(fails(container) for container in containers if not container.get("ready"))


def is_creating_containers(containers: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a pod has a node, and none of its containers exists yet: a volume may be missing."""
    return bool(containers) and all(
        (container.get("state", {}).get("waiting") or {}).get("reason") == reasons.CONTAINER_CREATING
        for container in containers
    )


def unschedulable_message(conditions: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the scheduler's message if no node fits a pod; empty if one does, or if it was not tried yet.

    Args:
        conditions: the pod's conditions, by type.
    """
    condition = conditions.get("PodScheduled", {})
    gated = condition.get("reason") == reasons.SCHEDULING_GATED
    return condition.get("message", "") if condition.get("status") == "False" and not gated else ""


def unfinished_init_containers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the statuses of init containers that have not succeeded."""
    return [
        container
        for container in status.get("initContainerStatuses", [])
        if container.get("state", {}).get("terminated", {}).get("exitCode") != 0
    ]


def _seconds_run(terminated: Mapping[str, Any]) -> float:
    """Return the run time of a terminated container in seconds; 0 if a time is missing."""
    started, finished = terminated.get("startedAt"), terminated.get("finishedAt")
    if not (started and finished):
        return 0.0
    return (datetime.fromisoformat(finished) - datetime.fromisoformat(started)).total_seconds()


def _exit_message(terminated: Mapping[str, Any]) -> str:
    """Return a container's termination message, or else a description of its exit.

    The termination message of a container that ran out of memory is the end of its log, unless it begins with
    one of the engine's own prefixes: then the kubelet's reason is put first.
    """
    message = terminated.get("message", "")
    if terminated.get("reason") == reasons.OOM_KILLED and message.partition(":")[0] not in MESSAGE_PREFIXES:
        return ": ".join(filter(None, (_describe_exit(terminated), message)))
    return message or _describe_exit(terminated)


def _describe_exit(terminated: Mapping[str, Any]) -> str:
    """Return the exit code, with the kubelet's reason if that says more than the code."""
    code, reason = _exit_code(terminated), terminated.get("reason", "")
    return f"{reason} ({code})" if reason == reasons.OOM_KILLED and code else code


def _exit_code(terminated: Mapping[str, Any]) -> str:
    return f"exit code {terminated['exitCode']}" if "exitCode" in terminated else ""
