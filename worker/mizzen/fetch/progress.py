# SPDX-License-Identifier: Apache-2.0
"""Progress of a fetch: phase, bytes, rate and remaining time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

WINDOW_SECONDS = 30.0
"""Period over which the download rate is averaged."""
_SAMPLE_SECONDS = 0.5


class FetchProgress:
    """Phase and received bytes of a fetch, updated by its threads. Thread-safe."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._phase = "starting"
        self._message = ""
        self._revision = ""
        self._total = 0
        self._done = 0
        self._samples: deque[tuple[float, int]] = deque([(now(), 0)])

    def enter_phase(self, name: str, message: str = "") -> None:
        """Set the phase: waiting, planning, downloading, verifying, unpacking or complete."""
        with self._lock:
            self._phase, self._message = name, message

    def report_retry(self, message: str) -> None:
        """Set a message about a retry; it is cleared when more bytes arrive."""
        with self._lock:
            self._message = message

    def start_counting(self, revision: str, total: int, done: int) -> None:
        """Set the revision, the total number of bytes, and the number of bytes already present (`done`).

        Bytes that were already present do not count towards the rate.
        """
        with self._lock:
            self._revision, self._total, self._done = revision, total, done
            self._samples = deque([(self._now(), done)])

    def add_bytes(self, count: int) -> None:
        """Add received bytes; a negative count subtracts bytes that were discarded."""
        with self._lock:
            self._done += count
            if count > 0:
                self._message = ""
            at = self._now()
            if at - self._samples[-1][0] >= _SAMPLE_SECONDS:
                self._samples.append((at, self._done))
            while len(self._samples) > 2 and at - self._samples[1][0] > WINDOW_SECONDS:
                self._samples.popleft()

    def snapshot(self) -> dict[str, Any]:
        """Return the progress as a JSON object.

        Its members are `phase`, `message`, `revision`, `totalBytes`, `fetchedBytes`, `bytesPerSecond` and,
        unless the rate is 0, `secondsLeft`.
        """
        with self._lock:
            since, before = self._samples[0]
            span = self._now() - since
            rate = int(max(0, self._done - before) / span) if span > 0 else 0
            left = max(0, self._total - self._done)
            return {
                "phase": self._phase,
                "message": self._message,
                "revision": self._revision,
                "totalBytes": self._total,
                "fetchedBytes": self._done,
                "bytesPerSecond": rate,
                **({"secondsLeft": -(-left // rate)} if rate else {}),
            }
