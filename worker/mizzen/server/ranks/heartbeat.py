# SPDX-License-Identifier: Apache-2.0
"""Heartbeats of ranks in shared memory, read by the processes that monitor the ranks.

A heartbeat consists of five numbers, each written atomically: the time at which the rank's process last ran,
the last launched step, the last completed step, the process id, and whether the rank serves. A separate
thread writes the time, so that it stays current while other threads are busy.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from dataclasses import dataclass

import numpy as np

HEARTBEAT_SECONDS = 0.25
_ALIVE, _LAUNCHED, _DONE, _PROCESS, _SERVES = range(5)
_ROW_NUMBERS = 8
"""Number of 8-byte values reserved per rank: one cache line."""


def create_heartbeats(ranks: int) -> int:
    """Return the file descriptor of zeroed shared memory for `ranks` heartbeats; the caller closes it."""
    descriptor = os.memfd_create("mizzen-heartbeats")
    os.ftruncate(descriptor, 8 * _ROW_NUMBERS * ranks)
    return descriptor


class HeartbeatWriter:
    """Writer of one rank's heartbeat."""

    def __init__(self, descriptor: int, rank: int) -> None:
        memory = mmap.mmap(descriptor, 0)
        self._numbers = np.frombuffer(memory, np.float64)[rank * _ROW_NUMBERS : (rank + 1) * _ROW_NUMBERS]
        self._numbers[_PROCESS] = os.getpid()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread that records that the process runs; call this once all imports are done."""
        self._numbers[_ALIVE] = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="mizzen-heartbeat", daemon=True)
        self._thread.start()

    def mark_serving(self) -> None:
        """Record that startup is complete; from now on the rank has to keep up with the other ranks."""
        self._numbers[_SERVES] = 1.0

    def ping(self) -> None:
        """Do nothing: this heartbeat's own thread already records that the process runs."""

    def launched(self, step: int) -> None:
        """Record the number of the last launched step."""
        self._numbers[_LAUNCHED] = step

    def done(self, step: int) -> None:
        """Record the number of the last completed step."""
        self._numbers[_DONE] = step

    def close(self) -> None:
        """Stop the thread; the rank is no longer monitored."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._numbers[_ALIVE] = 0.0

    def _run(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            self._numbers[_ALIVE] = time.monotonic()


@dataclass(frozen=True, slots=True)
class RankHeartbeat:
    """Progress of a rank at the time of reading."""

    alive: float
    """Monotonic time in seconds at which the rank's process last ran; 0 while the rank is not monitored, that
    is, before `start` and after `close`."""
    launched: int
    done: int
    process: int
    serving: bool = True
    """Whether the rank's startup is complete."""


class HeartbeatReader:
    """Reader of the heartbeats of a pod's ranks."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        self._numbers = np.frombuffer(memory, np.float64).reshape(ranks, _ROW_NUMBERS)

    def read(self) -> list[RankHeartbeat]:
        """Return the current heartbeat of each rank, in rank order."""
        return [
            RankHeartbeat(
                row[_ALIVE], int(row[_LAUNCHED]), int(row[_DONE]), int(row[_PROCESS]), bool(row[_SERVES])
            )
            for row in self._numbers.tolist()
        ]
