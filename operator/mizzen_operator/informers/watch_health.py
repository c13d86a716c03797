"""Whether the watches live: when each was answered last, and since when it fails."""

from __future__ import annotations

import time

from mizzen_operator.api import labels
from mizzen_operator.metrics import Metrics

SERVER_SECONDS = 240
"""A watch ends after this time and starts anew, so an older answer means that nobody watches."""
INACTIVITY_SECONDS = 70
STALE_SECONDS = SERVER_SECONDS + INACTIVITY_SECONDS + 20
FAILING_SECONDS = 60
KINDS = (labels.PLURAL, "pods", "deployments", "services")


class Watches:
    """When each kind's watch was answered last, and since when it fails."""

    def __init__(self, metrics: Metrics) -> None:
        self._answered: dict[str, float] = {}
        self._failing: dict[str, float] = {}
        self._events: dict[str, float] = {}
        for kind in KINDS:
            metrics.watch_age.labels(kind).set_function(lambda kind=kind: self.age(kind))
            metrics.watch_event_age.labels(kind).set_function(lambda kind=kind: self.event_age(kind))

    def begin(self) -> None:
        """Start the clocks; until then nothing is stale. A kind fails until its first answer."""
        self._answered = dict.fromkeys(KINDS, time.monotonic())
        self._failing = dict.fromkeys(KINDS, time.monotonic())

    def age(self, kind: str) -> float:
        """Seconds since a watch of a kind was answered; 0 before the first was sent."""
        at = self._answered.get(kind)
        return 0.0 if at is None else time.monotonic() - at

    def event(self, kind: str) -> None:
        """Note that a watch has brought an event."""
        self._events[kind] = time.monotonic()

    def event_age(self, kind: str) -> float:
        """Seconds since a watch of a kind brought an event, or was answered if that was later."""
        at = self._events.get(kind)
        age = self.age(kind)
        return age if at is None else min(age, time.monotonic() - at)

    def stale(self) -> list[str]:
        """Kinds that nobody watches any more."""
        now = time.monotonic()
        failing = {kind for kind, since in self._failing.items() if now - since > FAILING_SECONDS}
        return sorted(failing | {kind for kind in self._answered if self.age(kind) > STALE_SECONDS})

    def answered(self, kind: str, good: bool) -> None:
        """Note an answer, or its failure."""
        if kind not in KINDS:
            return
        now = time.monotonic()
        if good:
            self._answered[kind] = now
            self._failing.pop(kind, None)
        else:
            self._failing.setdefault(kind, now)
