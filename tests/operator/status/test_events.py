# SPDX-License-Identifier: Apache-2.0
"""Events of a service: which changes are reported, and that warnings are not repeated."""

from __future__ import annotations

from typing import Any

import pytest

from mizzen_operator.kube.errors import KubeError
from mizzen_operator.status import events
from mizzen_operator.status.events import (
    Event,
    EventRecorder,
    avoided_node_events,
    condition_events,
    moved_group_events,
)
from service_kit import service


class Writes:
    """Records created Events; fails on demand."""

    def __init__(self) -> None:
        self.recorded: list[str] = []
        self.fails = False

    async def create(self, manifest: dict[str, Any]) -> bool:
        if self.fails:
            raise KubeError(500, "", "no")
        self.recorded.append(f"{manifest['reason']}: {manifest['message']}")
        return True


def condition(kind: str, status: str, reason: str) -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": "why"}


@pytest.mark.parametrize(
    ("before", "after", "reasons"),
    [
        (("Failed", "False", "AsExpected"), ("Failed", "True", "ErrImagePull"), ["ErrImagePull"]),
        (("Failed", "True", "ErrImagePull"), ("Failed", "True", "ErrImagePull"), []),
        (("Failed", "True", "ErrImagePull"), ("Failed", "False", "AsExpected"), []),
        (("Available", "True", "Serving"), ("Available", "False", "NoGroupServes"), ["NoGroupServes"]),
        (("Available", "True", "Serving"), ("Available", "False", "ScaledToZero"), []),
        (("Available", "False", "NoGatewayReady"), ("Available", "False", "NoGroupServes"), []),
        (
            ("KeysRotating", "False", "KeysRotated"),
            ("KeysRotating", "True", "NextKeysPublished"),
            ["KeysRotating"],
        ),
    ],
)
def test_a_relevant_change_of_a_condition_is_an_event(before: Any, after: Any, reasons: list[str]) -> None:
    assert [event.reason for event in condition_events([condition(*before)], [condition(*after)])] == reasons


def test_a_moved_group_is_reported_once() -> None:
    lost = {"name": "demo-a-0-0", "reason": "NodeLost", "message": "node n is lost"}
    assert [event.message for event in moved_group_events([], [lost])] == ["demo-a-0-0: node n is lost"]
    assert moved_group_events([lost], [lost]) == []


def test_each_node_that_is_avoided_or_allowed_again_is_an_event() -> None:
    events = avoided_node_events(["a", "b"], ["b", "c"])
    assert [(event.reason, event.warning) for event in events] == [
        ("NodeAvoided", True),
        ("NodeAllowed", False),
    ]
    assert "node c" in events[0].message and "node a" in events[1].message


async def test_a_warning_is_not_repeated_within_ten_minutes() -> None:
    times, writes = [0.0], Writes()
    recorder = EventRecorder(writes, lambda: times[-1])  # type: ignore[arg-type]
    pulling, waiting = Event("ErrImagePull", "no such image", True), Event("ImagePullBackOff", "later", True)
    for minute in range(20):
        times.append(60.0 * minute)
        await recorder.record(service(), [pulling, waiting])
    assert writes.recorded == 2 * ["ErrImagePull: no such image", "ImagePullBackOff: later"]
    await recorder.record(service(), [Event("ErrImagePull", "no such tag", True)])
    assert writes.recorded[-1] == "ErrImagePull: no such tag", "another message is another warning"
    for _ in range(2):
        await recorder.record(service(), [Event("KeysRotating", "both")])
    assert writes.recorded[-2:] == 2 * ["KeysRotating: both"], "an Event that is not a warning is repeated"


async def test_the_number_of_remembered_warnings_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_REMEMBERED", 3)
    writes = Writes()
    recorder = EventRecorder(writes)  # type: ignore[arg-type]
    for number in (*range(5), 4, 0):
        await recorder.record(service(), [Event("NodeLost", str(number), True)])
    assert [event.partition(": ")[2] for event in writes.recorded] == ["0", "1", "2", "3", "4", "0"]


async def test_a_failed_write_of_an_event_stops_nothing_and_is_repeated() -> None:
    writes = Writes()
    writes.fails = True
    recorder = EventRecorder(writes)  # type: ignore[arg-type]
    await recorder.record(service(), [Event("NodeLost", "x", True)])
    writes.fails = False
    await recorder.record(service(), [Event("NodeLost", "x", True)])
    assert writes.recorded == ["NodeLost: x"], "the first write has failed"
