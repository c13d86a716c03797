# SPDX-License-Identifier: Apache-2.0
"""Normal Events for the steps that users wait for."""

from __future__ import annotations

from typing import Any

import pytest

from mizzen_operator.status.lifecycle_events import lifecycle_events


def status(
    ready: str = "", cached: bool | None = None, groups: int = 1, update: str = "a", **more: Any
) -> dict[str, Any]:
    """Return a status; `ready` is the reason with which Ready is True, or empty if it is False."""
    conditions = [
        {
            "type": "Ready",
            "status": "True" if ready else "False",
            "reason": ready or "StartingGroups",
            "message": "1 of 1 groups serve",
        }
    ]
    if cached is not None:
        conditions.append(
            {"type": "ModelCached", "status": str(cached), "reason": "x", "message": "hf://a/b is cached"}
        )
    return {
        "conditions": conditions,
        "progress": {"groups": groups},
        "updateRevision": update,
        **more,
    }


SERVES = status("AllGroupsServing", currentRevision="a")
ZERO = status("ScaledToZero", groups=0, currentRevision="a")
BY_HAND = "(spec.replicas was changed)"
SCALE = {"lastScale": {"to": 3, "reason": "SaturationAboveTarget", "time": "t"}}


@pytest.mark.parametrize(
    ("previous", "current", "events"),
    [
        ({}, status(), ["Created: the service is accepted, and its objects are created"]),
        (status(), SERVES, ["Ready: 1 of 1 groups serve"]),
        (SERVES, SERVES, []),
        (status(cached=False), status(cached=True), ["Downloaded: hf://a/b is cached"]),
        (SERVES, status(currentRevision="a", update="b"), ["RolloutStarted: revision b replaces revision a"]),
        (
            status(currentRevision="a", update="b"),
            status("AllGroupsServing", currentRevision="b", update="b"),
            ["RolloutFinished: all groups run revision b", "Ready: 1 of 1 groups serve"],
        ),
        (
            SERVES,
            {**SERVES, "progress": {"groups": 2}},
            [f"Scaled: from 1 to 2 groups {BY_HAND}"],
        ),
        (
            SERVES,
            {**SERVES, "progress": {"groups": 3}, **SCALE},
            ["Scaled: from 1 to 3 groups (autoscaling: SaturationAboveTarget)"],
        ),
        (SERVES, ZERO, [f"Scaled: from 1 to 0 groups {BY_HAND}"]),
        (ZERO, status(currentRevision="a"), [f"Woke: from 0 to 1 groups {BY_HAND}"]),
        (status(groups=0), ZERO, []),
        (
            ZERO,
            SERVES,
            [f"Woke: from 0 to 1 groups {BY_HAND}", "Ready: 1 of 1 groups serve"],
        ),
    ],
)
def test_each_step_is_one_event(previous: dict[str, Any], current: dict[str, Any], events: list[str]) -> None:
    found = lifecycle_events(previous, current)
    assert [f"{event.reason}: {event.message}" for event in found] == events
    assert not any(event.warning for event in found)
