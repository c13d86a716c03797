"""Events of a service: what changed for its users, said once in a while at most."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.api.service_ref import Subject
from mizzen_operator.kube.client import Kube, KubeError
from mizzen_operator.kube.errors import TERMINATING
from mizzen_operator.kube.objects import stamp
from mizzen_operator.pods.container_state import DEVICE_LOST, NODE_LOST

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1024
REPEAT_SECONDS = 600.0
"""A warning that comes again sooner says nothing new: a group that fails, or a service that flaps."""
REMEMBERED = 4096
"""Warnings that are recognized when they come again."""
QUIET = ("Suspended", "ScaledToZero")
"""Reasons of Available that its owner asked for."""


@dataclass(frozen=True, slots=True)
class Event:
    """What is told; `warning` when somebody should look."""

    reason: str
    message: str
    warning: bool = False


def news(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[Event]:
    """What a change of conditions means to whoever reads events; nothing while they stay.

    Args:
        before: conditions of the status as it was; none for a new service.
        after: conditions of the status that was written.
    """
    was = {one["type"]: one for one in before}
    told: list[Event] = []
    for one in after:
        old = was.get(one["type"], {})
        if (old.get("status"), old.get("reason")) == (one["status"], one["reason"]):
            continue
        kind, true = one["type"], one["status"] == "True"
        if (kind, true) in (("Failed", True), ("ApiKeysInForce", False)) or (
            kind == "Available" and not true and old.get("status") == "True" and one["reason"] not in QUIET
        ):
            told.append(Event(one["reason"], one["message"], warning=True))
        elif kind == "KeysRotating" and old.get("status", "False") != one["status"]:
            told.append(Event("KeysRotating" if true else one["reason"], one["message"]))
    return told


MOVED = (DEVICE_LOST, NODE_LOST)


def moves(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[Event]:
    """What became of groups whose device or node is lost, said once of each.

    Args:
        before: groups of the status as it was.
        after: groups of the status that was written.
    """
    known = {(one["name"], one.get("reason")) for one in before}
    return [
        Event(one["reason"], f"{one['name']}: {one.get('message', '')}", warning=True)
        for one in after
        if one.get("reason") in MOVED and (one["name"], one["reason"]) not in known
    ]


class Recorder:
    """Writes Events; one that cannot be written is logged and keeps nothing from its way."""

    def __init__(self, kube: Kube, clock: Callable[[], float] = time.monotonic) -> None:
        """Write through a client; `clock` is any that never goes back, in seconds."""
        self._kube = kube
        self._clock = clock
        self._told: OrderedDict[tuple[str, str, str], float] = OrderedDict()
        """Warnings by the service's uid, with their times, the oldest first."""

    async def tell(self, service: Subject, events: Sequence[Event]) -> None:
        """Write events of a service, but for warnings that it was told of a short while ago."""
        for event in events:
            which = (service.uid, event.reason, event.message)
            if event.warning and self._clock() - self._told.get(which, float("-inf")) < REPEAT_SECONDS:
                continue
            try:
                await self._kube.create(_manifest(service, event))
            except KubeError as error:
                if TERMINATING in str(error):
                    return
                logger.warning("%s/%s: no event %s: %s", service.namespace, service.name, event.reason, error)
                continue
            if event.warning:
                self._remember(which)

    def _remember(self, warning: tuple[str, str, str]) -> None:
        self._told[warning] = self._clock()
        self._told.move_to_end(warning)
        while len(self._told) > REMEMBERED:
            self._told.popitem(last=False)


def _manifest(service: Subject, event: Event) -> dict[str, Any]:
    now = stamp(datetime.now(UTC))
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{service.name}.{time.time_ns():x}", "namespace": service.namespace},
        "involvedObject": {
            "apiVersion": labels.API_VERSION,
            "kind": labels.KIND,
            "name": service.name,
            "namespace": service.namespace,
            "uid": service.uid,
        },
        "type": "Warning" if event.warning else "Normal",
        "reason": event.reason,
        "message": event.message[:MAX_MESSAGE],
        "source": {"component": labels.FIELD_MANAGER},
        "reportingComponent": labels.FIELD_MANAGER,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
