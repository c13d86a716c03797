# SPDX-License-Identifier: Apache-2.0
"""Tracks when each watch last got a response, and how long it has been failing, for liveness and metrics."""

from __future__ import annotations

import time

from mizzen_operator.api import labels
from mizzen_operator.metrics import Metrics

SERVER_SECONDS = 240
"""Seconds after which the API server ends a watch; kopf then starts it again.

If the last successful response is much older than that, the kind is no longer watched.
"""
INACTIVITY_SECONDS = 70
STALE_SECONDS = SERVER_SECONDS + INACTIVITY_SECONDS + 20
"""Age of the last successful response, in seconds, above which a watch is stale."""
FAILING_SECONDS = 60
"""Seconds for which a watch may keep failing before it counts as stale."""
KINDS = (labels.PLURAL, "pods", "deployments", "services")
"""Plurals of the watched kinds."""


class WatchHealth:
    """Times of each watch's last response and last event, and of the first failure after that response."""

    def __init__(self, metrics: Metrics) -> None:
        self._response_times: dict[str, float] = {}
        self._failing_since: dict[str, float] = {}
        self._event_times: dict[str, float] = {}
        for kind in KINDS:
            metrics.watch_age.labels(kind).set_function(lambda kind=kind: self.seconds_since_response(kind))
            metrics.watch_event_age.labels(kind).set_function(
                lambda kind=kind: self.seconds_since_event(kind)
            )

    def start(self) -> None:
        """Start the clocks. From now on a kind counts as failing until its first successful response."""
        self._response_times = dict.fromkeys(KINDS, time.monotonic())
        self._failing_since = dict.fromkeys(KINDS, time.monotonic())

    def seconds_since_response(self, kind: str) -> float:
        """Return the seconds since the last response to a kind's watch; 0 before the start."""
        at = self._response_times.get(kind)
        return 0.0 if at is None else time.monotonic() - at

    def record_event(self, kind: str) -> None:
        """Record an event of a kind's watch."""
        self._event_times[kind] = time.monotonic()

    def seconds_since_event(self, kind: str) -> float:
        """Return the seconds since a kind's last event, or its last response if that is later."""
        at = self._event_times.get(kind)
        age = self.seconds_since_response(kind)
        return age if at is None else min(age, time.monotonic() - at)

    def stale_kinds(self) -> list[str]:
        """Return the kinds whose watch has failed, or has had no response, for too long."""
        now = time.monotonic()
        failing = {kind for kind, since in self._failing_since.items() if now - since > FAILING_SECONDS}
        return sorted(
            failing
            | {kind for kind in self._response_times if self.seconds_since_response(kind) > STALE_SECONDS}
        )

    def record_response(self, kind: str, good: bool) -> None:
        """Record whether a list or watch request of a kind succeeded; kinds without a watch are ignored."""
        if kind not in KINDS:
            return
        now = time.monotonic()
        if good:
            self._response_times[kind] = now
            self._failing_since.pop(kind, None)
        else:
            self._failing_since.setdefault(kind, now)
