"""How far each rank of a group is, in shared memory.

Five numbers a rank, each written whole: when its process last ran (a thread of its own tells, whatever the
others do), the last step that it launched, the last that it completed, the process's id, and whether it
serves.
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
"""Numbers of 8 bytes a rank: a line of the processor's cache."""


def create_heartbeats(ranks: int) -> int:
    """Return a descriptor of zeroed memory for all ranks; the caller closes it."""
    descriptor = os.memfd_create("mizzen-heartbeats")
    os.ftruncate(descriptor, 8 * _ROW_NUMBERS * ranks)
    return descriptor


class HeartbeatWriter:
    """A rank's end."""

    def __init__(self, descriptor: int, rank: int) -> None:
        memory = mmap.mmap(descriptor, 0)
        self._numbers = np.frombuffer(memory, np.float64)[rank * _ROW_NUMBERS : (rank + 1) * _ROW_NUMBERS]
        self._numbers[_PROCESS] = os.getpid()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Show from now on that the process runs; called once all is imported."""
        self._numbers[_ALIVE] = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="mizzen-heartbeat", daemon=True)
        self._thread.start()

    def mark_serving(self) -> None:
        """Show that the start is over: from now on the rank has to keep up."""
        self._numbers[_SERVES] = 1.0

    def ping(self) -> None:
        """Do nothing: the thread tells."""

    def launched(self, step: int) -> None:
        """Show that a step was launched."""
        self._numbers[_LAUNCHED] = step

    def done(self, step: int) -> None:
        """Show that a step is complete."""
        self._numbers[_DONE] = step

    def close(self) -> None:
        """End the thread; from now on the rank is not watched."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._numbers[_ALIVE] = 0.0

    def _run(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            self._numbers[_ALIVE] = time.monotonic()


@dataclass(frozen=True, slots=True)
class RankHeartbeat:
    """How far a rank is."""

    alive: float
    """When it last ran, in monotonic seconds; 0: it is not watched, as it has not begun to load, or ended."""
    launched: int
    done: int
    process: int
    serving: bool = True
    """Its start is over."""


class HeartbeatReader:
    """The watcher's end."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        self._numbers = np.frombuffer(memory, np.float64).reshape(ranks, _ROW_NUMBERS)

    def read(self) -> list[RankHeartbeat]:
        """Return how far each rank is."""
        return [
            RankHeartbeat(
                row[_ALIVE], int(row[_LAUNCHED]), int(row[_DONE]), int(row[_PROCESS]), bool(row[_SERVES])
            )
            for row in self._numbers.tolist()
        ]
