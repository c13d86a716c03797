# SPDX-License-Identifier: Apache-2.0
"""Find a rank that stalls the engine, from the heartbeats of all ranks.

Used by the supervisor of node 0 and by `LocalRanks`.
"""

from __future__ import annotations

from mizzen.server.clock_gaps import ClockGapMeter
from mizzen.server.ranks.heartbeat import RankHeartbeat

STARTUP_SECONDS = 60.0
"""Minimum deadline for heartbeats during startup: drivers and compilers may block all threads of a
process."""


class StallDetector:
    """Finds a rank that stalls the engine, by comparing successive heartbeats.

    A rank is at fault if its process does not run for `seconds`, if it launches no step for `seconds`
    although other ranks are ahead, or if it does not complete a step within `step_seconds`. While any rank is
    loading, only the first rule applies, with a deadline of at least `STARTUP_SECONDS`. Time in which the
    detector itself did not run is excluded.
    """

    def __init__(
        self, ranks: int, seconds: float, step_seconds: float, *, own_rank: int | None = None
    ) -> None:
        """Set the deadlines.

        Args:
            ranks: Number of ranks.
            seconds: Deadline for heartbeats and for keeping up with other ranks.
            step_seconds: Deadline for completing a step.
            own_rank: Rank of this process; None if this process is not a rank.
        """
        self._seconds = seconds
        self._step_seconds = step_seconds
        self._own_rank = own_rank
        """Rank of this process. It may pause for any time between steps, so that of the two deadlines only
        `step_seconds` applies to it."""
        self._clock_gaps = ClockGapMeter()
        self._alive_at = [0.0] * ranks
        """Time at which each rank last ran, plus the lengths of all clock gaps since then."""
        self._lagging: list[tuple[int, float] | None] = [None] * ranks
        """For each rank that is behind the newest step: the number of the step that it launched last, and the
        time since which this number has not changed; None for other ranks."""
        self._unfinished: list[tuple[int, float] | None] = [None] * ranks
        """For each rank with steps in flight: the number of the step that it completed last, and the
        time since which this number has not changed; None for other ranks."""

    def find_fault(self, heartbeats: list[RankHeartbeat], now: float) -> str | None:
        """Return a description of the first rank that is at fault, or None.

        Args:
            heartbeats: Current heartbeats of all ranks, in rank order.
            now: Current monotonic time in seconds.
        """
        self._exclude_gap(self._clock_gaps.measure(now), heartbeats, now)
        if any(heartbeat.serving and not heartbeat.alive for heartbeat in heartbeats):
            return None  # a rank is exiting
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
        """Record when each rank last ran, and move all recorded times forward by a clock gap of `seconds`."""
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
        name, seconds = _rank_name(rank, heartbeat), now - since
        return (
            f"{name} has been at step {heartbeat.launched} for {seconds:.1f} s, others are at {newest_step}"
        )

    def _check_step(self, rank: int, heartbeat: RankHeartbeat, now: float) -> str | None:
        since = self._stuck_since(
            self._unfinished, rank, heartbeat.done, heartbeat.done < heartbeat.launched, now
        )
        if now - since <= self._step_seconds:
            return None
        step = heartbeat.done + 1
        name, seconds = _rank_name(rank, heartbeat), now - since
        return f"{name} has been running step {step} for {seconds:.1f} s: a collective hangs"

    @staticmethod
    def _stuck_since(
        marks: list[tuple[int, float] | None], rank: int, step: int, is_stuck: bool, now: float
    ) -> float:
        """Return the time since which a rank has been stuck at `step`, recorded in `marks[rank]`.

        If `is_stuck` is False, clear `marks[rank]` and return `now`.
        """
        entry = marks[rank]
        if not is_stuck:
            marks[rank] = None
            return now
        if entry is None or entry[0] != step:
            marks[rank] = entry = (step, now)
        return entry[1]


def _rank_name(rank: int, heartbeat: RankHeartbeat) -> str:
    return f"rank {rank} (process {heartbeat.process})"
