# SPDX-License-Identifier: Apache-2.0
"""Token bucket that limits the rate of writes to the API server."""

from __future__ import annotations

import asyncio
import time


class TokenBucket:
    """Admits `rate` calls per second on average, and bursts of `burst` calls."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = float(burst)
        self._refilled_at = time.monotonic()

    async def acquire(self) -> None:
        """Wait for a token; callers are served in order."""
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._refilled_at) * self._rate)
        self._refilled_at = now
        self._tokens -= 1
        if self._tokens < 0:
            await asyncio.sleep(-self._tokens / self._rate)
