"""Finds the rank that holds up the others."""

from __future__ import annotations

from mizzen.server.clock_gaps import ClockGapMeter
from mizzen.server.ranks.heartbeat import RankHeartbeat

STARTUP_SECONDS = 60.0
"""How long a rank that loads may not run: drivers and compilers hold all threads of a process."""


class StallDetector:
    """Finds the rank that holds up the others, from one look to the next.

    A rank that does not run, that launches no step while others do, or whose step does not end for `seconds`
    is at fault. While one loads, it and the others have but to run, within `START_SECONDS`. Time in which
    nobody looks does not count.
    """

    def __init__(
        self, ranks: int, seconds: float, step_seconds: float, *, own_rank: int | None = None
    ) -> None:
        """Take the deadline of ranks, that of steps, and which rank is the process that looks, if one is."""
        self._seconds = seconds
        self._step_seconds = step_seconds
        self._own_rank = own_rank
        """It runs, and what its thread is at is the program's affair."""
        self._clock_gaps = ClockGapMeter()
        self._alive_at = [0.0] * ranks
        """When they last ran, as far as can be blamed on them."""
        self._lagging: list[tuple[int, float] | None] = [None] * ranks
        """Of ranks behind others: the step they are at, and since when."""
        self._unfinished: list[tuple[int, float] | None] = [None] * ranks
        """Of ranks with steps in flight: the last that is complete, and since when."""

    def find_fault(self, heartbeats: list[RankHeartbeat], now: float) -> str | None:
        """Return what is wrong, if anything is."""
        self._exclude_gap(self._clock_gaps.measure(now), heartbeats, now)
        if any(heartbeat.serving and not heartbeat.alive for heartbeat in heartbeats):
            return None  # some rank ends
        all_serving = all(heartbeat.serving for heartbeat in heartbeats)
        limit = self._seconds if all_serving else max(self._seconds, STARTUP_SECONDS)
        faults = [self._check_alive(rank, heartbeat, limit, now) for rank, heartbeat in enumerate(heartbeats)]
        if all_serving:
            newest_step = max(heartbeat.launched for heartbeat in heartbeats)
            for rank, heartbeat in enumerate(heartbeats):
                faults += [
                    self._check_lag(rank, heartbeat, newest_step, now),
                    self._check_step(rank, heartbeat, now),
                ]
        return next((fault for fault in faults if fault), None)

    def _exclude_gap(self, seconds: float, heartbeats: list[RankHeartbeat], now: float) -> None:
        """Count so many seconds as if they had not been."""
        alive_at = [
            max(at, heartbeat.alive) for at, heartbeat in zip(self._alive_at, heartbeats, strict=True)
        ]
        self._alive_at = [min(now, at + seconds) for at in alive_at]
        for marks in (self._lagging, self._unfinished):
            marks[:] = [(entry[0], entry[1] + seconds) if entry else None for entry in marks]

    def _check_alive(self, rank: int, heartbeat: RankHeartbeat, limit: float, now: float) -> str | None:
        idle_seconds = now - self._alive_at[rank]
        if not heartbeat.alive or rank == self._own_rank or idle_seconds <= limit:
            return None
        return f"{_rank_name(rank, heartbeat)} has not run for {idle_seconds:.1f} s: it is stopped or starved"

    def _check_lag(self, rank: int, heartbeat: RankHeartbeat, newest_step: int, now: float) -> str | None:
        since = self._stuck_since(
            self._lagging, rank, heartbeat.launched, heartbeat.launched < newest_step, now
        )
        if rank == self._own_rank or now - since <= self._seconds:
            return None
        return f"{_rank_name(rank, heartbeat)} is at step {heartbeat.launched} for {now - since:.1f} s, others at {newest_step}"

    def _check_step(self, rank: int, heartbeat: RankHeartbeat, now: float) -> str | None:
        since = self._stuck_since(
            self._unfinished, rank, heartbeat.done, heartbeat.done < heartbeat.launched, now
        )
        if now - since <= self._step_seconds:
            return None
        step = heartbeat.done + 1
        return (
            f"{_rank_name(rank, heartbeat)} has run step {step} for {now - since:.1f} s: a collective hangs"
        )

    @staticmethod
    def _stuck_since(
        marks: list[tuple[int, float] | None], rank: int, step: int, is_stuck: bool, now: float
    ) -> float:
        """Return since when a rank has been at a step where it should not stay; now where it may."""
        entry = marks[rank]
        if not is_stuck:
            marks[rank] = None
            return now
        if entry is None or entry[0] != step:
            marks[rank] = entry = (step, now)
        return entry[1]


def _rank_name(rank: int, heartbeat: RankHeartbeat) -> str:
    return f"rank {rank} (process {heartbeat.process})"
