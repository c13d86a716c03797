"""A circuit breaker: an engine that keeps failing gets nothing for a while, then one request to show itself.

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
    """The numbers are those of the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerLimits:
    """When a breaker opens, and for how long."""

    failures: int = 5
    """In a row, without a success between."""
    seconds: float = 1.0
    """Of the first time; each failure of a probe doubles it."""
    max_seconds: float = 30.0
    probes: int = 1
    """Requests at once while half-open."""


class CircuitBreaker:
    """One engine's. `begin` is called for each request sent, and answered by one of the other three.

    An outcome counts for the period in which its request began: a stream of better days that ends well does
    not close a breaker that has opened since, and one that ends badly does not open it for longer.
    """

    __slots__ = ("_clock", "_failures", "_limits", "_period", "_probes", "_seconds", "_until", "open_count")

    def __init__(
        self, limits: BreakerLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits or BreakerLimits()
        self._clock = clock
        self._period = 0
        self.open_count = 0
        """How often it has opened."""
        self._close()

    @property
    def state(self) -> BreakerState:
        """Its state now."""
        if self._until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._until else BreakerState.HALF_OPEN

    @property
    def allows(self) -> bool:
        """Whether a request may be sent now."""
        state = self.state
        if state is BreakerState.HALF_OPEN:
            return self._probes < self._limits.probes
        return state is BreakerState.CLOSED

    @property
    def remaining_seconds(self) -> float:
        """Seconds until an open breaker lets a probe through; 0 when it is not open."""
        return 0.0 if self._until is None else max(0.0, self._until - self._clock())

    def begin_request(self) -> int:
        """Note that a request is sent; return what its outcome is reported with."""
        if self.state is BreakerState.HALF_OPEN:
            self._probes += 1
        return self._period

    def record_success(self, period: int) -> None:
        """Note that a request got an answer."""
        if period != self._period:
            return
        self._failures = 0
        if self._until is not None:
            self._close()

    def record_failure(self, period: int) -> bool:
        """Note that a request failed or timed out; tell whether the breaker has opened by that."""
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
        """Note that a request ended without a verdict on the engine."""
        if period == self._period and self._until is not None:
            self._probes -= 1

    def reset(self) -> None:
        """Start anew: the engine is another process now."""
        self._period += 1
        self._close()

    def _close(self) -> None:
        self._failures = 0
        self._probes = 0
        self._seconds = self._limits.seconds
        self._until: float | None = None
