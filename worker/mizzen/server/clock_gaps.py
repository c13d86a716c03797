"""Whether a watcher itself ran: where a container is paused or a machine stalls, nobody does."""

from __future__ import annotations

NORMAL_CHECK_SECONDS = 1.0
"""Between two looks; what is more is nobody's doing, for the watcher did not run either."""


class ClockGapMeter:
    """Counts the time that nobody can be blamed for."""

    def __init__(self) -> None:
        self._checked_at: float | None = None

    def measure(self, now: float) -> float:
        """Look; return so many seconds of it since the last look."""
        previous, self._checked_at = self._checked_at, now
        return max(0.0, now - previous - NORMAL_CHECK_SECONDS) if previous is not None else 0.0
