"""Sequences of one request, which share capacity with each other before they compete with other requests.

Only a few of them stand in the queue at a time, so a request with many sequences neither fills the queue nor
overtakes others. Once one has begun, the others do not time out because their own siblings use the capacity:
their time in the queue counts from when none of them runs.
"""

from __future__ import annotations

import asyncio
import time

MAX_IN_QUEUE = 8
"""Number of sequences of one request that stand in the queue at a time; fewer if the queue is short."""


class SiblingSequences:
    """Shared state of the sequences of one request. On one event loop."""

    def __init__(self, seconds: float, queue_size: int) -> None:
        """Make the shared state of sequences that may wait `seconds` each, in a queue of `queue_size`."""
        self.seconds = seconds
        self.queue_slots = asyncio.Semaphore(max(1, min(MAX_IN_QUEUE, queue_size // MAX_IN_QUEUE)))
        """Held by the sequences that stand in the queue."""
        self.started = False
        """True if one was admitted: the request has begun and is no longer rejected because the queue is
        full."""
        self._running = 0
        self._until = 0.0

    @property
    def wait_deadline(self) -> float:
        """Time until which each may wait, on the monotonic clock; 0 before any has run."""
        return time.monotonic() + self.seconds if self._running else self._until

    @property
    def may_wait(self) -> bool:
        """True if one runs, or ran so recently that the others may still wait."""
        return self.wait_deadline > time.monotonic()

    def sequence_started(self) -> None:
        """Record that an engine has begun one of them."""
        self._running += 1

    def sequence_ended(self) -> None:
        """Record that an engine no longer runs one of them."""
        self._running -= 1
        self._until = time.monotonic() + self.seconds
