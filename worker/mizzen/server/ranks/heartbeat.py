"""Heartbeats of ranks in shared memory, read by the processes that monitor the ranks.

Each rank has five numbers, each written atomically: the time at which its process last ran (written by a
separate thread, whatever the others do), the last launched step, the last completed step, the process id, and
whether the rank serves.
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
"""Numbers of 8 bytes reserved per rank: one cache line."""


def create_heartbeats(ranks: int) -> int:
    """Return the descriptor of zeroed memory for all ranks; the caller closes it."""
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
        """Start the thread that shows that the process runs; called once all imports are done."""
        self._numbers[_ALIVE] = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="mizzen-heartbeat", daemon=True)
        self._thread.start()

    def mark_serving(self) -> None:
        """Record that startup is complete: from now on the rank has to keep up with the others."""
        self._numbers[_SERVES] = 1.0

    def ping(self) -> None:
        """Do nothing: the thread shows that the process runs."""

    def launched(self, step: int) -> None:
        """Record that a step was launched."""
        self._numbers[_LAUNCHED] = step

    def done(self, step: int) -> None:
        """Record that a step completed."""
        self._numbers[_DONE] = step

    def close(self) -> None:
        """Stop the thread; the rank is not monitored any longer."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._numbers[_ALIVE] = 0.0

    def _run(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            self._numbers[_ALIVE] = time.monotonic()


@dataclass(frozen=True, slots=True)
class RankHeartbeat:
    """Progress of a rank."""

    alive: float
    """Monotonic time at which the process last ran; 0 if it is not monitored, before it loads and after it
    ended."""
    launched: int
    done: int
    process: int
    serving: bool = True
    """Whether the rank's startup is complete."""


class HeartbeatReader:
    """Reader of the heartbeats of all ranks of a pod."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        self._numbers = np.frombuffer(memory, np.float64).reshape(ranks, _ROW_NUMBERS)

    def read(self) -> list[RankHeartbeat]:
        """Return the heartbeat of each rank."""
        return [
            RankHeartbeat(
                row[_ALIVE], int(row[_LAUNCHED]), int(row[_DONE]), int(row[_PROCESS]), bool(row[_SERVES])
            )
            for row in self._numbers.tolist()
        ]
