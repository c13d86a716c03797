"""MODULE."""

from __future__ import annotations

import asyncio
import time


class TokenBucket:
    """Lets `rate` calls a second pass on average and `burst` at once."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = float(burst)
        self._refilled_at = time.monotonic()

    async def acquire(self) -> None:
        """Wait for a turn; turns are given in order of the calls."""
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._refilled_at) * self._rate)
        self._refilled_at = now
        self._tokens -= 1
        if self._tokens < 0:
            await asyncio.sleep(-self._tokens / self._rate)
