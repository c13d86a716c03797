"""Token buckets for limits per minute."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """Token bucket that refills within a minute and may go into debt if usage exceeds the reservation.

    A new bucket is full, so a minute's worth may be used at once.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        """Remaining amount; negative in debt."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return self._level

    def take(self, amount: float) -> float:
        """Take an amount and return 0.0, or take nothing and return the seconds until it is available."""
        missing = amount - self.level
        if missing > 0:
            return missing * 60 / self.per_minute
        self._level -= amount
        return 0.0

    def refund(self, amount: float) -> None:
        """Return an amount that was taken in excess; a negative amount takes more."""
        self._level = min(self.per_minute, self.level + amount)

    def set_rate(self, per_minute: int) -> None:
        """Change the rate; used amounts stay used."""
        used = self.per_minute - self.level
        self.per_minute, self._level = per_minute, per_minute - used

    @property
    def full_in_seconds(self) -> float:
        """Seconds until the bucket is full."""
        return (self.per_minute - self.level) * 60 / self.per_minute
