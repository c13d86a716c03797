"""Finds the rank that holds up the others."""

from __future__ import annotations

from mizzen.server.clock_gaps import Awake
from mizzen.server.ranks.heartbeat import Pulse

START_SECONDS = 60.0
"""How long a rank that loads may not run: drivers and compilers hold all threads of a process."""


class RankWatch:
    """Finds the rank that holds up the others, from one look to the next.

    A rank that does not run, that launches no step while others do, or whose step does not end for `seconds`
    is at fault. While one loads, it and the others have but to run, within `START_SECONDS`. Time in which
    nobody looks does not count.
    """

    def __init__(self, ranks: int, seconds: float, step_seconds: float, *, itself: int | None = None) -> None:
        """Take the deadline of ranks, that of steps, and which rank is the process that looks, if one is."""
        self._seconds = seconds
        self._step_seconds = step_seconds
        self._itself = itself
        """It runs, and what its thread is at is the program's affair."""
        self._awake = Awake()
        self._alive = [0.0] * ranks
        """When they last ran, as far as can be blamed on them."""
        self._behind: list[tuple[int, float] | None] = [None] * ranks
        """Of ranks behind others: the step they are at, and since when."""
        self._running: list[tuple[int, float] | None] = [None] * ranks
        """Of ranks with steps in flight: the last that is complete, and since when."""

    def look(self, pulses: list[Pulse], now: float) -> str | None:
        """Return what is wrong, if anything is."""
        self._forgive(self._awake.slept(now), pulses, now)
        if any(pulse.serves and not pulse.alive for pulse in pulses):
            return None  # some rank ends
        serve = all(pulse.serves for pulse in pulses)
        limit = self._seconds if serve else max(self._seconds, START_SECONDS)
        faults = [self._stopped(rank, pulse, limit, now) for rank, pulse in enumerate(pulses)]
        if serve:
            ahead = max(pulse.launched for pulse in pulses)
            for rank, pulse in enumerate(pulses):
                faults += [self._late(rank, pulse, ahead, now), self._hangs(rank, pulse, now)]
        return next((fault for fault in faults if fault), None)

    def _forgive(self, seconds: float, pulses: list[Pulse], now: float) -> None:
        """Count so many seconds as if they had not been."""
        heard = [max(at, pulse.alive) for at, pulse in zip(self._alive, pulses, strict=True)]
        self._alive = [min(now, at + seconds) for at in heard]
        for noted in (self._behind, self._running):
            noted[:] = [(one[0], one[1] + seconds) if one else None for one in noted]

    def _stopped(self, rank: int, pulse: Pulse, limit: float, now: float) -> str | None:
        idle = now - self._alive[rank]
        if not pulse.alive or rank == self._itself or idle <= limit:
            return None
        return f"{_name(rank, pulse)} has not run for {idle:.1f} s: it is stopped or starved"

    def _late(self, rank: int, pulse: Pulse, ahead: int, now: float) -> str | None:
        since = self._since(self._behind, rank, pulse.launched, pulse.launched < ahead, now)
        if rank == self._itself or now - since <= self._seconds:
            return None
        return f"{_name(rank, pulse)} is at step {pulse.launched} for {now - since:.1f} s, others at {ahead}"

    def _hangs(self, rank: int, pulse: Pulse, now: float) -> str | None:
        since = self._since(self._running, rank, pulse.done, pulse.done < pulse.launched, now)
        if now - since <= self._step_seconds:
            return None
        step = pulse.done + 1
        return f"{_name(rank, pulse)} has run step {step} for {now - since:.1f} s: a collective hangs"

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


def _name(rank: int, pulse: Pulse) -> str:
    return f"rank {rank} (process {pulse.process})"
