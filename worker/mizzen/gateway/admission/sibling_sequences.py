"""Sequences of one request, which share the slots that there are with one another before they do with others.

A few of them at a time stand in the queue, so that a request neither fills it nor has all others behind it,
however many sequences it has. Once one has begun, the others are not lost because their own siblings keep the
slots: their time in the queue counts from when none of them runs.
"""

from __future__ import annotations

import asyncio
import time

MAX_IN_QUEUE = 8
"""So many of them stand in the queue at a time; fewer where the queue is short."""


class SiblingSequences:
    """What the sequences of one request know of one another. All on one event loop."""

    def __init__(self, seconds: float, queue_size: int) -> None:
        """Let them wait so long in a queue of a size."""
        self.seconds = seconds
        self.queue_slots = asyncio.Semaphore(max(1, min(MAX_IN_QUEUE, queue_size // MAX_IN_QUEUE)))
        """Held by those that stand in the queue."""
        self.started = False
        """Whether one has got a turn: the request has begun, and is not refused for want of room any more."""
        self._running = 0
        self._until = 0.0

    @property
    def wait_deadline(self) -> float:
        """Until when one of them waits at least, in seconds of the monotonic clock; 0 before any has run."""
        return time.monotonic() + self.seconds if self._running else self._until

    @property
    def may_wait(self) -> bool:
        """Whether one runs, or has run so lately that the others wait."""
        return self.wait_deadline > time.monotonic()

    def sequence_started(self) -> None:
        """Note that an engine gives one of them tokens."""
        self._running += 1

    def sequence_ended(self) -> None:
        """Note that it does so no more."""
        self._running -= 1
        self._until = time.monotonic() + self.seconds
