# SPDX-License-Identifier: Apache-2.0
"""Circuit breaker: an engine that keeps failing gets no requests for a while, then a few as a probe.

    closed ──`failures` in a row──▶ open ──after its time──▶ half-open ──a success──▶ closed
                                     ▲                           │
                                     └──a failure, twice the time┘

After Nygard, Release It! (2007), chapter "Circuit Breaker".
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass


class BreakerState(enum.IntEnum):
    """State of a circuit breaker; the numbers are the values of the metric `breaker_state`."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerLimits:
    """Limits of a circuit breaker."""

    failures: int = 5
    """Consecutive failures that open a closed breaker."""
    seconds: float = 1.0
    """Time for which the breaker stays open at first; each failed probe doubles it."""
    max_seconds: float = 30.0
    """Longest time for which the breaker stays open."""
    probes: int = 1
    """Number of requests that may be in progress at once while the breaker is half-open."""


class CircuitBreaker:
    """Circuit breaker of one engine.

    The caller ends each `begin_request` with `record_success`, `record_failure` or `cancel_request`. A new
    period starts when the breaker opens and when it is reset. An outcome counts only in the period in which
    its request began. Thus a stream that began before the breaker opened neither closes it nor keeps it open.
    """

    __slots__ = ("_clock", "_failures", "_limits", "_period", "_probes", "_seconds", "_until", "open_count")

    def __init__(
        self, limits: BreakerLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits or BreakerLimits()
        self._clock = clock
        self._period = 0
        self.open_count = 0
        """Number of times that the breaker has opened."""
        self._close()

    @property
    def state(self) -> BreakerState:
        """Current state."""
        if self._until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._until else BreakerState.HALF_OPEN

    @property
    def allows(self) -> bool:
        """True if a request may be sent now."""
        state = self.state
        if state is BreakerState.HALF_OPEN:
            return self._probes < self._limits.probes
        return state is BreakerState.CLOSED

    @property
    def remaining_seconds(self) -> float:
        """Seconds until an open breaker allows a probe; 0 if it is not open."""
        return 0.0 if self._until is None else max(0.0, self._until - self._clock())

    def begin_request(self) -> int:
        """Record that a request is sent; return the current period, which must be passed with the outcome."""
        if self.state is BreakerState.HALF_OPEN:
            self._probes += 1
        return self._period

    def record_success(self, period: int) -> None:
        """Record that the engine answered a request that began in `period`."""
        if period != self._period:
            return
        self._failures = 0
        if self._until is not None:
            self._close()

    def record_failure(self, period: int) -> bool:
        """Record that a request that began in `period` failed; return whether this opened the breaker."""
        if period != self._period:
            return False
        self._failures += 1
        probing = self._until is not None
        if not probing and self._failures < self._limits.failures:
            return False
        self._seconds = min(2 * self._seconds, self._limits.max_seconds) if probing else self._limits.seconds
        self._until = self._clock() + self._seconds
        self._period += 1
        self._probes = 0
        self.open_count += 1
        return True

    def cancel_request(self, period: int) -> None:
        """Record that a request that began in `period` was neither a success nor a failure of the engine."""
        if period == self._period and self._until is not None:
            self._probes -= 1

    def reset(self) -> None:
        """Close the breaker and start a new period, because the engine is a new process."""
        self._period += 1
        self._close()

    def _close(self) -> None:
        self._failures = 0
        self._probes = 0
        self._seconds = self._limits.seconds
        self._until: float | None = None
