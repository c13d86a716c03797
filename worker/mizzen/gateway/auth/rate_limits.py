"""Token buckets for limits per minute, and the division of a key's limits among gateway processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from mizzen.gateway.auth.api_keys import Grant


class TokenBucket:
    """Token bucket that refills within a minute; its level may be negative if usage exceeds a reservation.

    A new bucket is full, so a whole minute's amount may be used at once.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        """Amount that may be consumed now; negative if more was used than the rate allows."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return self._level

    def consume(self, amount: float) -> float:
        """Consume an amount and return 0.0.

        If the bucket does not hold that much, consume nothing and return the seconds until it does.
        """
        missing = amount - self.level
        if missing > 0:
            return missing * 60 / self.per_minute
        self._level -= amount
        return 0.0

    def refund(self, amount: float) -> None:
        """Give back an amount that was consumed in excess; a negative amount consumes more."""
        self._level = min(self.per_minute, self.level + amount)

    def set_rate(self, per_minute: int) -> None:
        """Change the rate; amounts that were consumed stay consumed."""
        used = self.per_minute - self.level
        self.per_minute, self._level = per_minute, per_minute - used

    @property
    def full_in_seconds(self) -> float:
        """Seconds until the bucket is full."""
        return (self.per_minute - self.level) * 60 / self.per_minute


def divide_limits(grant: Grant, parts: int) -> Grant:
    """Return a grant with each limit divided among `parts` gateway processes, rounded up.

    Every process enforces its part on its own, so together they allow at least the key's limits.
    """

    def part(limit: int | None) -> int | None:
        return None if limit is None else -(-limit // parts)

    return replace(
        grant,
        requests_per_minute=part(grant.requests_per_minute),
        tokens_per_minute=part(grant.tokens_per_minute),
        max_parallel=part(grant.max_parallel),
    )
