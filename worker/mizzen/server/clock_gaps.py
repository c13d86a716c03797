"""Measure gaps in which a monitoring process itself did not run.

If a container is paused or a machine stalls, neither the monitor nor the ranks run. The supervisor and the
stall detector exclude such gaps from the ranks' deadlines.
"""

from __future__ import annotations

NORMAL_CHECK_SECONDS = 1.0
"""Longest normal time between two checks; any excess is time in which the monitor did not run."""


class ClockGapMeter:
    """Measures the time in which the monitor did not run."""

    def __init__(self) -> None:
        self._checked_at: float | None = None

    def measure(self, now: float) -> float:
        """Record a check at `now`; return the seconds since the previous check that count as a gap."""
        previous, self._checked_at = self._checked_at, now
        return max(0.0, now - previous - NORMAL_CHECK_SECONDS) if previous is not None else 0.0
