"""Why a pod does not run, or is to go, as its status says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mizzen_operator import labels

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
        if waiting.get("reason") in FAILING_REASONS:
            return waiting["reason"], ended.get("message") or _exit(ended) or waiting.get("message", "")
        if state.get("terminated") or (ended and not entry.get("ready")):
            return ended.get("reason", "Error"), ended.get("message") or _exit(ended)
    if status.get("phase") == "Failed":
        return status.get("reason", "Failed"), status.get("message", "")
    return "", ""


def failed_first(status: Mapping[str, Any]) -> list[Any]:
    """Init containers that have not done their work."""
    given = status.get("initContainerStatuses", [])
    return [one for one in given if one.get("state", {}).get("terminated", {}).get("exitCode") != 0]


def _exit(ended: Mapping[str, Any]) -> str:
    return f"exit code {ended['exitCode']}" if "exitCode" in ended else ""
