"""Progress of a fetch: bytes, rate and remaining time. Shared by the threads of the fetch."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

WINDOW_SECONDS = 30.0
"""Window over which the download rate is averaged."""
_SAMPLE_SECONDS = 0.5


class FetchProgress:
    """Counts received bytes and the phase of a fetch. Thread-safe."""

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
        """Enter a phase: waiting, planning, downloading, verifying, unpacking or complete."""
        with self._lock:
            self._phase, self._message = name, message

    def report_retry(self, message: str) -> None:
        """Set the message about a retry; the next received bytes clear it."""
        with self._lock:
            self._message = message

    def start_counting(self, revision: str, total: int, done: int) -> None:
        """Set the total bytes and those already present, which do not count toward the rate."""
        with self._lock:
            self._revision, self._total, self._done = revision, total, done
            self._samples = deque([(self._now(), done)])

    def add_bytes(self, count: int) -> None:
        """Add received bytes; a negative count removes discarded ones."""
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
        """Return `phase`, `message`, `revision`, `totalBytes`, `fetchedBytes` and `bytesPerSecond`.

        `secondsLeft` is included once there is a rate.
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
