# SPDX-License-Identifier: Apache-2.0
"""Normal Events for the steps of a service that users wait for, from two consecutive statuses. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mizzen_operator.api import reasons
from mizzen_operator.status.events import Event

_SERVING_REASONS = (reasons.ALL_GROUPS_SERVING, reasons.PARTITION_REACHED)
"""Reasons with which Ready is True because groups serve."""


def lifecycle_events(previous: Mapping[str, Any], current: Mapping[str, Any]) -> list[Event]:
    """Return the Events for what has been reached, in the order in which it happens.

    Args:
        previous: the previous status; empty for a new service.
        current: the status that was written.
    """
    before, after = _conditions(previous), _conditions(current)
    events: list[Event] = []
    if not before:
        events.append(Event(reasons.CREATED, "the service is accepted, and its objects are created"))
    cached = after.get(reasons.MODEL_CACHED, {})
    if _became_true(before, after, reasons.MODEL_CACHED) and before:
        events.append(Event(reasons.DOWNLOADED, cached["message"]))
    events += _scale_events(previous, current)
    old, new = previous.get("updateRevision", ""), current.get("updateRevision", "")
    if old and new and old != new:
        events.append(Event(reasons.ROLLOUT_STARTED, f"revision {new} replaces revision {old}"))
    old, new = previous.get("currentRevision", ""), current.get("currentRevision", "")
    if old and new and old != new:
        events.append(Event(reasons.ROLLOUT_FINISHED, f"all groups run revision {new}"))
    ready = after.get(reasons.READY, {})
    if _became_true(before, after, reasons.READY) and ready["reason"] in _SERVING_REASONS:
        events.append(Event(reasons.READY, ready["message"]))
    return events


def _conditions(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {condition["type"]: condition for condition in status.get("conditions", [])}


def _became_true(before: Mapping[str, Any], after: Mapping[str, Any], kind: str) -> bool:
    is_true = after.get(kind, {}).get("status") == "True"
    was_serving = before.get(kind, {}).get("status") == "True"
    woke = kind == reasons.READY and before.get(kind, {}).get("reason") == reasons.SCALED_TO_ZERO
    woke = woke and after.get(kind, {}).get("reason") != reasons.SCALED_TO_ZERO
    return is_true and (not was_serving or woke)


def _scale_events(previous: Mapping[str, Any], current: Mapping[str, Any]) -> list[Event]:
    """Return an Event if the number of wanted groups has changed."""
    before, after = (status.get("progress", {}).get("groups") for status in (previous, current))
    if before is None or after is None or before == after:
        return []
    last = current.get("lastScale", {})
    by_autoscaler = last != previous.get("lastScale", {}) and last.get("to") == after
    cause = f"autoscaling: {last.get('reason', '')}" if by_autoscaler else "spec.replicas was changed"
    reason = reasons.WOKE if before == 0 else reasons.SCALED
    return [Event(reason, f"from {before} to {after} groups ({cause})")]
