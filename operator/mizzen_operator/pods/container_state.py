"""Why a pod does not run, or is to go, as its status says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.pods.termination_cause import KINDS, OUT_OF_MEMORY

CRASH_LOOP = "CrashLoopBackOff"
FAILING_REASONS = frozenset(
    {
        CRASH_LOOP,
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)


DEVICE_LOST, NODE_LOST = "DeviceLost", "NodeLost"
"""Reasons of groups that are moved."""
NODE_LOST_REASONS = frozenset({"DeletionByTaintManager", "DeletionByPodGC"})
"""Of a pod's condition DisruptionTarget: its node cannot be reached, or is no longer there."""


def device_lost(containers: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """What an engine said of the device that it has lost, and whether its `restartCount` counts that end.

    Empty where it has not lost any, or runs all the same: kubelet has started it again, and it is ready.
    """
    for entry in containers:
        now, last = (entry.get(state, {}).get("terminated") for state in ("state", "lastState"))
        ended = now or last or {}
        if entry.get("name") == labels.ENGINE and ended.get("exitCode") == labels.DEVICE_LOST_CODE:
            words = ended.get("message") or f"the engine has lost its device ({_exit(ended)})"
            return ("", True) if entry.get("ready") else (words.strip(), now is None)
    return "", True


def disruption(pod: Mapping[str, Any], condition: Mapping[str, Any]) -> tuple[str, str]:
    """Why a pod was told to go, or is gone, by something else than its owner."""
    reason, node = condition.get("reason", ""), pod["spec"].get("nodeName", "")
    if reason not in NODE_LOST_REASONS:
        return reason or "Disrupted", condition.get("message", "")
    words = f"node {node} is lost, and a group elsewhere takes its place; the pod goes once the node is back"
    return NODE_LOST, f"{words} or removed ({condition.get('message', '')})"


def trouble(status: Mapping[str, Any], containers: list[Any]) -> tuple[str, str]:
    """Why a pod does not run: the container's own words where there are some, else the node's."""
    for entry in containers:
        state, last = entry.get("state", {}), entry.get("lastState", {})
        ended = state.get("terminated") or last.get("terminated") or {}
        waiting = state.get("waiting") or {}
        if waiting.get("reason") == CRASH_LOOP:  # the node only says how long it waits
            return CRASH_LOOP, _words(ended) or waiting.get("message", "")
        if waiting.get("reason") in FAILING_REASONS:
            return waiting["reason"], waiting.get("message") or _words(ended)
        if state.get("terminated") or (ended and not entry.get("ready")):
            return ended.get("reason", "Error"), _words(ended)
    if status.get("phase") == "Failed":
        return status.get("reason", "Failed"), status.get("message", "")
    return "", ""


LOOP_SECONDS = 600.0
"""A container that ran for longer before it ended does not loop: so the kubelet's back-off has it, too."""
UNSCHEDULABLE = "Unschedulable"


def loops(containers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a container cannot run, or ends again and again soon after it began.

    Also while its next try runs: so far it has failed. One end is none yet, nor is one after a long time.
    """

    def fails(entry: Mapping[str, Any]) -> bool:
        state, last = entry.get("state", {}), entry.get("lastState", {})
        if (state.get("waiting") or {}).get("reason") in FAILING_REASONS:
            return True
        ended = state.get("terminated") or last.get("terminated")
        return bool(ended) and entry.get("restartCount", 0) > 1 and _ran(ended) < LOOP_SECONDS

    return any(fails(entry) for entry in containers if not entry.get("ready"))


def waits_to_begin(containers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a node has taken a pod and made none of its containers yet, as while a volume is missing."""
    return bool(containers) and all(
        (entry.get("state", {}).get("waiting") or {}).get("reason") == "ContainerCreating"
        for entry in containers
    )


def unschedulable(conditions: Mapping[str, Mapping[str, Any]]) -> str:
    """The scheduler's words for why no node takes a pod; empty where one does, or it was not asked yet."""
    found = conditions.get("PodScheduled", {})
    held = found.get("status") == "False" and found.get("reason") != "SchedulingGated"
    return found.get("message", "") if held else ""


def _ran(ended: Mapping[str, Any]) -> float:
    """Seconds that a container ran; 0 where nobody says."""
    began, end = ended.get("startedAt"), ended.get("finishedAt")
    if not (began and end):
        return 0.0
    return (datetime.fromisoformat(end) - datetime.fromisoformat(began)).total_seconds()


def failed_first(status: Mapping[str, Any]) -> list[Any]:
    """Init containers that have not done their work."""
    given = status.get("initContainerStatuses", [])
    return [one for one in given if one.get("state", {}).get("terminated", {}).get("exitCode") != 0]


def _words(ended: Mapping[str, Any]) -> str:
    """A container's own last words, else how it ended.

    Of one that was out of memory these are the end of its log, unless they begin with its word for an end.
    """
    message = ended.get("message", "")
    if ended.get("reason") == OUT_OF_MEMORY and message.partition(":")[0] not in KINDS:
        return ": ".join(filter(None, (_end(ended), message)))
    return message or _end(ended)


def _end(ended: Mapping[str, Any]) -> str:
    """How a container ended, with the node's word for it where that says more than an exit code."""
    reason = ended.get("reason", "")
    return f"{reason} ({_exit(ended)})" if reason == OUT_OF_MEMORY and _exit(ended) else _exit(ended)


def _exit(ended: Mapping[str, Any]) -> str:
    return f"exit code {ended['exitCode']}" if "exitCode" in ended else ""
