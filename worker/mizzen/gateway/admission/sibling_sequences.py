# SPDX-License-Identifier: Apache-2.0
"""Siblings: the sequences of one request, which wait for each other before they compete with other requests.

Only a few siblings are in the queue at a time, so a request with many sequences neither fills the queue nor
overtakes others. While any sibling runs, the waiting siblings do not time out, because their own request uses
the capacity: their timeout starts when the last running sibling ends.
"""

from __future__ import annotations

import asyncio
import time

MAX_IN_QUEUE = 8
"""Maximum number of sequences of one request in the queue at a time; fewer if the queue is short."""


class SiblingSequences:
    """State that the sequences of one request share. Not thread-safe."""

    def __init__(self, seconds: float, queue_size: int) -> None:
        """Create the state of sequences that may wait `seconds` each, in a queue of `queue_size` entries."""
        self.seconds = seconds
        self.queue_slots = asyncio.Semaphore(max(1, min(MAX_IN_QUEUE, queue_size // MAX_IN_QUEUE)))
        """Semaphore that a sequence holds while it is in the queue."""
        self.started = False
        """True once a sequence has been admitted; from then on, a full queue does not reject the others."""
        self._running = 0
        self._until = 0.0

    @property
    def wait_deadline(self) -> float:
        """Time on the monotonic clock until which the waiting sequences may wait; 0 before any has run."""
        return time.monotonic() + self.seconds if self._running else self._until

    @property
    def may_wait(self) -> bool:
        """True if a sequence runs, or ran so recently that the others may still wait."""
        return self.wait_deadline > time.monotonic()

    def sequence_started(self) -> None:
        """Record that an engine has begun to run a sequence."""
        self._running += 1

    def sequence_ended(self) -> None:
        """Record that an engine no longer runs a sequence."""
        self._running -= 1
        self._until = time.monotonic() + self.seconds
