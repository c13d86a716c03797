"""Whether a watcher itself ran: where a container is paused or a machine stalls, nobody does."""

from __future__ import annotations

SLEPT_SECONDS = 1.0
"""Between two looks; what is more is nobody's doing, for the watcher did not run either."""


class Awake:
    """Counts the time that nobody can be blamed for."""

    def __init__(self) -> None:
        self._looked: float | None = None

    def slept(self, now: float) -> float:
        """Look; return so many seconds of it since the last look."""
        before, self._looked = self._looked, now
        return max(0.0, now - before - SLEPT_SECONDS) if before is not None else 0.0
