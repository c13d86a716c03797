"""How far each rank of a group is, in shared memory, and what to make of it.

Four numbers a rank, each written whole: when its process last ran (a thread of its own tells, whatever the
others do), the last step that it launched, the last that it completed, and the process's id.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from dataclasses import dataclass

import numpy as np

ALIVE_SECONDS = 0.25
_ALIVE, _LAUNCHED, _DONE, _PROCESS = range(4)
_LINE = 8
"""Numbers of 8 bytes a rank: a line of the processor's cache."""


def create_pulses(ranks: int) -> int:
    """Return a descriptor of zeroed memory for all ranks; the caller closes it."""
    descriptor = os.memfd_create("mizzen-pulses")
    os.ftruncate(descriptor, 8 * _LINE * ranks)
    return descriptor


class PulseWriter:
    """A rank's end."""

    def __init__(self, descriptor: int, rank: int) -> None:
        memory = mmap.mmap(descriptor, 0)
        self._numbers = np.frombuffer(memory, np.float64)[rank * _LINE : (rank + 1) * _LINE]
        self._numbers[_PROCESS] = os.getpid()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Show from now on that the process runs; called once the rank serves."""
        self._numbers[_ALIVE] = time.monotonic()
        self._thread = threading.Thread(target=self._live, name="mizzen-pulse", daemon=True)
        self._thread.start()

    def beat(self) -> None:
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

    def _live(self) -> None:
        while not self._stop.wait(ALIVE_SECONDS):
            self._numbers[_ALIVE] = time.monotonic()


@dataclass(frozen=True, slots=True)
class Pulse:
    """How far a rank is."""

    alive: float
    """When it last ran, in monotonic seconds; 0: it is not watched, as it does not serve yet, or ended."""
    launched: int
    done: int
    process: int


class PulseReader:
    """The watcher's end."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        self._numbers = np.frombuffer(memory, np.float64).reshape(ranks, _LINE)

    def read(self) -> list[Pulse]:
        """Return how far each rank is."""
        return [
            Pulse(row[_ALIVE], int(row[_LAUNCHED]), int(row[_DONE]), int(row[_PROCESS]))
            for row in self._numbers.tolist()
        ]


class RankWatch:
    """Finds the rank that holds up the others, from one look to the next.

    A rank that does not run, that launches no step while others do, or whose step does not end for `seconds`
    is at fault.
    """

    def __init__(self, ranks: int, seconds: float, step_seconds: float) -> None:
        """Take the deadline of ranks, and that of steps."""
        self._seconds = seconds
        self._step_seconds = step_seconds
        self._behind: list[tuple[int, float] | None] = [None] * ranks
        """Of ranks behind others: the step they are at, and since when."""
        self._running: list[tuple[int, float] | None] = [None] * ranks
        """Of ranks with steps in flight: the last that is complete, and since when."""

    def look(self, pulses: list[Pulse], now: float) -> str | None:
        """Return what is wrong, if anything is."""
        if not all(pulse.alive for pulse in pulses):
            return None  # some rank does not serve yet, or ends
        ahead = max(pulse.launched for pulse in pulses)
        faults: list[str] = []
        for rank, pulse in enumerate(pulses):
            who = f"rank {rank} (process {pulse.process})"
            if now - pulse.alive > self._seconds:
                faults.insert(0, f"{who} has not run for {now - pulse.alive:.1f} s: it is stopped or starved")
            since = self._since(self._behind, rank, pulse.launched, pulse.launched < ahead, now)
            if now - since > self._seconds:
                faults.append(f"{who} is at step {pulse.launched} for {now - since:.1f} s, others at {ahead}")
            since = self._since(self._running, rank, pulse.done, pulse.done < pulse.launched, now)
            if now - since > self._step_seconds:
                step = pulse.done + 1
                faults.append(f"{who} has run step {step} for {now - since:.1f} s: a collective hangs")
        return faults[0] if faults else None

    @staticmethod
    def _since(noted: list[tuple[int, float] | None], rank: int, step: int, waits: bool, now: float) -> float:
        """Return since when a rank has been at a step where it should not stay; now where it may."""
        known = noted[rank]
        if not waits:
            noted[rank] = None
            return now
        if known is None or known[0] != step:
            noted[rank] = known = (step, now)
        return known[1]
