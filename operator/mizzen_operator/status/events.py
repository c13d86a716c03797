# SPDX-License-Identifier: Apache-2.0
"""Writes Events of a service: for changed conditions, and for groups that lost their device or node.

The status writer calls it after each write of a status. A warning is not repeated within ten minutes.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mizzen_operator.api import labels, reasons
from mizzen_operator.api.reasons import MAX_MESSAGE
from mizzen_operator.api.service_ref import ServiceRef
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import NAMESPACE_TERMINATING_TEXT, KubeError
from mizzen_operator.kube.objects import timestamp
from mizzen_operator.rollout.avoided_nodes import LOSSES

logger = logging.getLogger(__name__)

REPEAT_SECONDS = 600.0
"""Seconds for which the same warning is not repeated, for example while a group keeps failing."""
MAX_REMEMBERED = 4096
"""Maximum number of warnings that are remembered so as not to repeat them."""
_EXPECTED = (reasons.SUSPENDED, reasons.SCALED_TO_ZERO)
"""Reasons with which Available is False as intended: no groups are wanted, so this is not an outage."""
_MOVED = (reasons.DEVICE_LOST, reasons.NODE_LOST)
"""Reasons for which a group is moved to another node."""


@dataclass(frozen=True, slots=True)
class Event:
    """One Event; `warning` is True if its type is Warning."""

    reason: str
    message: str
    warning: bool = False


def condition_events(
    previous: Sequence[Mapping[str, Any]], current: Sequence[Mapping[str, Any]]
) -> list[Event]:
    """Return the Events for the conditions that have changed.

    Args:
        previous: conditions of the previous status; empty for a new service.
        current: conditions of the status that was written.
    """
    by_type = {condition["type"]: condition for condition in previous}
    events: list[Event] = []
    for condition in current:
        old = by_type.get(condition["type"], {})
        if (old.get("status"), old.get("reason")) == (condition["status"], condition["reason"]):
            continue
        kind, true = condition["type"], condition["status"] == "True"
        failed = (kind, true) in ((reasons.FAILED, True), (reasons.API_KEYS_IN_FORCE, False))
        outage = (
            kind == reasons.AVAILABLE
            and not true
            and old.get("status") == "True"
            and condition["reason"] not in _EXPECTED
        )
        if failed or outage:
            events.append(Event(condition["reason"], condition["message"], warning=True))
        elif kind == reasons.KEYS_ROTATING and old.get("status", "False") != condition["status"]:
            reason = reasons.KEYS_ROTATING if true else condition["reason"]
            events.append(Event(reason, condition["message"]))
    return events


def moved_group_events(
    previous: Sequence[Mapping[str, Any]], current: Sequence[Mapping[str, Any]]
) -> list[Event]:
    """Return one Event for each group that has just lost its device or its node.

    Args:
        previous: `status.groups` of the previous status.
        current: `status.groups` of the status that was written.
    """
    reported = {(group["name"], group.get("reason")) for group in previous}
    return [
        Event(group["reason"], f"{group['name']}: {group.get('message', '')}", warning=True)
        for group in current
        if group.get("reason") in _MOVED and (group["name"], group["reason"]) not in reported
    ]


def avoided_node_events(previous: Sequence[str], current: Sequence[str]) -> list[Event]:
    """Return one Event for each node that new groups avoid from now on, or may use again.

    Args:
        previous: `status.avoidedNodes` of the previous status.
        current: `status.avoidedNodes` of the status that was written.
    """
    avoided = [
        Event(
            reasons.NODE_AVOIDED,
            f"engines lost their GPU on node {node} {LOSSES} times within an hour: new groups are not placed "
            "there for up to an hour; check the GPUs of the node",
            warning=True,
        )
        for node in current
        if node not in previous
    ]
    allowed = [
        Event(reasons.NODE_ALLOWED, f"groups may be placed on node {node} again")
        for node in previous
        if node not in current
    ]
    return [*avoided, *allowed]


class EventRecorder:
    """Writes Events; if a write fails, it is logged, and the reconcile continues."""

    def __init__(self, kube: KubeClient, clock: Callable[[], float] = time.monotonic) -> None:
        """Write the Events through `kube`; `clock` returns the monotonic time in seconds."""
        self._kube = kube
        self._clock = clock
        self._warnings: OrderedDict[tuple[str, str, str], float] = OrderedDict()
        """Times of recent warnings, the oldest first; a key is (uid of the service, reason, message)."""

    async def record(self, service: ServiceRef, events: Sequence[Event]) -> None:
        """Write Events of a service; skip warnings that were already written in the last `REPEAT_SECONDS`."""
        for event in events:
            identity = (service.uid, event.reason, event.message)
            age = self._clock() - self._warnings.get(identity, float("-inf"))
            if event.warning and age < REPEAT_SECONDS:
                continue
            try:
                await self._kube.create(_manifest(service, event))
            except KubeError as error:
                if NAMESPACE_TERMINATING_TEXT in str(error):
                    return
                logger.warning(
                    "%s/%s: cannot write event %s: %s", service.namespace, service.name, event.reason, error
                )
                continue
            if event.warning:
                self._remember(identity)

    def _remember(self, warning: tuple[str, str, str]) -> None:
        self._warnings[warning] = self._clock()
        self._warnings.move_to_end(warning)
        while len(self._warnings) > MAX_REMEMBERED:
            self._warnings.popitem(last=False)


def _manifest(service: ServiceRef, event: Event) -> dict[str, Any]:
    now = timestamp(datetime.now(UTC))
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
