"""Rates: how many requests or tokens a minute."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """A token bucket that a minute fills, and that may be in debt: what is used exceeds what was expected.

    A fresh one is full, so that a minute's worth may come at once.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        """What is left; below 0 in debt."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return self._level

    def take(self, amount: float) -> float:
        """Take an amount and return 0.0, or take nothing and return after how many seconds it is there."""
        missing = amount - self.level
        if missing > 0:
            return missing * 60 / self.per_minute
        self._level -= amount
        return 0.0

    def refund(self, amount: float) -> None:
        """Give back what was taken too much; with an amount below 0, take what was taken too little."""
        self._level = min(self.per_minute, self.level + amount)

    def set_rate(self, per_minute: int) -> None:
        """Take another rate; what was used stays used."""
        used = self.per_minute - self.level
        self.per_minute, self._level = per_minute, per_minute - used

    @property
    def full_in_seconds(self) -> float:
        """After how long all of it is there again."""
        return (self.per_minute - self.level) * 60 / self.per_minute
