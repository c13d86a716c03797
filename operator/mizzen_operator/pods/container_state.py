# SPDX-License-Identifier: Apache-2.0
"""Problems of a pod and its containers: waiting, crash loop, unschedulable, disruption, lost device. Pure.

Used for engine pods, gateway pods and pods that fetch models. If a container left a termination message, the
problem's message quotes that instead of the kubelet's message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from mizzen_operator.api import labels, reasons
from mizzen_operator.pods.termination_cause import MESSAGE_PREFIXES

IMAGE_REASONS = frozenset(
    {
        reasons.ERR_IMAGE_NEVER_PULL,
        reasons.ERR_IMAGE_PULL,
        reasons.IMAGE_PULL_BACK_OFF,
        reasons.INVALID_IMAGE_NAME,
    }
)
"""Reasons of waiting containers whose image cannot be pulled."""
FAILING_WAIT_REASONS = IMAGE_REASONS | {
    reasons.CRASH_LOOP_BACK_OFF,
    reasons.CREATE_CONTAINER_CONFIG_ERROR,
    reasons.CREATE_CONTAINER_ERROR,
    reasons.RUN_CONTAINER_ERROR,
}
"""Reasons of waiting containers that will not run until the spec, or the cluster, is changed."""
NODE_LOST_REASONS = frozenset({reasons.DELETION_BY_TAINT_MANAGER, reasons.DELETION_BY_POD_GC})
"""Reasons of a pod's condition DisruptionTarget if its node is unreachable or was removed."""
_CREATING_REASONS = (reasons.CONTAINER_CREATING, reasons.POD_INITIALIZING)
CRASH_LOOP_SECONDS = 600.0
"""The exit of a container that ran for at least this time does not count as part of a crash loop.

The kubelet resets its back-off after the same time.
"""


def engine_containers(containers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the statuses of an engine pod's engine; admission may have injected other containers."""
    return [container for container in containers if container.get("name") == labels.ENGINE]


def has_ended(pod: Mapping[str, Any]) -> bool:
    """Return whether an engine pod can never be ready again.

    The phase alone is not enough: an injected sidecar keeps the phase Running after the engine has ended.
    With `restartPolicy: Never`, a pod in which any container has ended never becomes ready again.
    """
    status = pod.get("status", {})
    if status.get("phase") in ("Failed", "Succeeded"):
        return True
    return pod["spec"].get("restartPolicy") == "Never" and any(
        container.get("state", {}).get("terminated") for container in status.get("containerStatuses", [])
    )


def order_by_relevance(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the container statuses of an engine pod in the order in which their problems are reported.

    Once the engine has been created, it comes first: when it has ended, the kubelet stops the sidecars, and
    their exit codes do not explain anything. Until then, an init container may be what the pod waits for.
    """
    containers = status.get("containerStatuses", [])
    engines = engine_containers(containers)
    begun = [engine for engine in engines if "waiting" not in engine.get("state", {"waiting": {}})]
    others = [container for container in containers if container not in engines]
    waiting = [engine for engine in engines if engine not in begun]
    return [*begun, *unfinished_init_containers(status), *waiting, *others]


def read_device_loss(containers: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """Return an engine's message that it lost its device, and whether `restartCount` includes the exit.

    The message is empty if the engine lost no device, or was restarted after the loss and is ready.
    `restartCount` does not include the engine's exit until the container is restarted.

    Args:
        containers: the container statuses of an engine pod.
    """
    for container in engine_containers(containers):
        current, previous = (container.get(state, {}).get("terminated") for state in ("state", "lastState"))
        terminated = current or previous or {}
        if terminated.get("exitCode") == labels.DEVICE_LOST_CODE:
            message = (
                terminated.get("message") or f"the engine has lost its device ({_exit_code(terminated)})"
            )
            return ("", True) if container.get("ready") else (message.strip(), current is None)
    return "", True


def read_configuration_error(containers: Sequence[Mapping[str, Any]]) -> str:
    """Return an engine's message that its configuration is wrong, which a restart does not cure.

    The message is empty if the engine last exited for another reason, or is ready.

    Args:
        containers: the container statuses of an engine pod.
    """
    for container in containers:
        if container.get("name") != labels.ENGINE or container.get("ready"):
            continue
        states = (container.get(state, {}).get("terminated") for state in ("state", "lastState"))
        terminated = next(filter(None, states), {})
        if terminated.get("exitCode") == labels.CONFIGURATION_CODE:
            return _exit_message(terminated).strip()
    return ""


def read_disruption(pod: Mapping[str, Any], condition: Mapping[str, Any]) -> tuple[str, str]:
    """Return the reason and message of a disruption, such as an eviction or the loss of a node.

    Args:
        pod: the pod.
        condition: the pod's condition DisruptionTarget, which is True.
    """
    reason, node = condition.get("reason", ""), pod["spec"].get("nodeName", "")
    if reason not in NODE_LOST_REASONS:
        return reason or reasons.DISRUPTED, condition.get("message", "")
    message = (
        f"node {node} is lost, and the group is replaced on another node; the pod goes once the node is back"
    )
    return reasons.NODE_LOST, f"{message} or removed ({condition.get('message', '')})"


def read_problem(status: Mapping[str, Any], containers: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the reason and message of a pod's problem; two empty strings if its containers run.

    Args:
        status: the pod's status; its own reason is used if no container has a problem.
        containers: the container statuses to check; the first one with a problem is reported.
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
    """Return whether a container cannot run, or has exited repeatedly soon after its start.

    Repeated exits are at least two restarts, with a last run shorter than `CRASH_LOOP_SECONDS`. While the
    next attempt runs, the result stays True until the container is ready.
    """

    def fails(container: Mapping[str, Any]) -> bool:
        state, previous = container.get("state", {}), container.get("lastState", {})
        if (state.get("waiting") or {}).get("reason") in FAILING_WAIT_REASONS:
            return True
        terminated = state.get("terminated") or previous.get("terminated")
        restarted = container.get("restartCount", 0) > 1
        return bool(terminated) and restarted and _seconds_run(terminated) < CRASH_LOOP_SECONDS

    return any(fails(container) for container in containers if not container.get("ready"))


def is_creating_containers(status: Mapping[str, Any]) -> bool:
    """Return whether a pod's node is still creating its containers and none has started.

    The reason may be a missing volume. A pod with init containers waits with the reason PodInitializing.

    Args:
        status: the pod's status.
    """
    containers = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    waiting = [container.get("state", {}).get("waiting") or {} for container in containers]
    return bool(containers) and all(state.get("reason") in _CREATING_REASONS for state in waiting)


def unschedulable_message(conditions: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the scheduler's message if no node fits a pod; empty if one fits or scheduling has not begun.

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
    """Return the run time of a terminated container in seconds; 0 if its start or end time is missing."""
    started, finished = terminated.get("startedAt"), terminated.get("finishedAt")
    if not (started and finished):
        return 0.0
    return (datetime.fromisoformat(finished) - datetime.fromisoformat(started)).total_seconds()


def _exit_message(terminated: Mapping[str, Any]) -> str:
    """Return a container's termination message, or a description of its exit if it left none.

    If a container ran out of memory, its message is only the end of its log. The kubelet's reason is then put
    before the message, unless the message begins with one of the engine's `MESSAGE_PREFIXES`.
    """
    message = terminated.get("message", "")
    if terminated.get("reason") == reasons.OOM_KILLED and message.partition(":")[0] not in MESSAGE_PREFIXES:
        return ": ".join(filter(None, (_describe_exit(terminated), message)))
    return message or _describe_exit(terminated)


def _describe_exit(terminated: Mapping[str, Any]) -> str:
    """Return a text with the exit code, and with the kubelet's reason if it is OOMKilled."""
    code, reason = _exit_code(terminated), terminated.get("reason", "")
    return f"{reason} ({code})" if reason == reasons.OOM_KILLED and code else code


def _exit_code(terminated: Mapping[str, Any]) -> str:
    return f"exit code {terminated['exitCode']}" if "exitCode" in terminated else ""
