# SPDX-License-Identifier: Apache-2.0
"""Health checks of engines: detect unresponsive and stuck engines long before the timeouts.

Engines report their load once a second. An engine that was silent for `ping_after` seconds gets a ping, which
its event loop must answer. If the engine is silent for `suspect_after` seconds, it is suspect: it gets new
requests only if no other engine is left. That is long before its timeout (`engine_timeout_seconds`).

An engine announces how long its steps may take (`Stats.patience_seconds`). If a step takes longer, its
requests count as lost, provided that another engine can resume them. The engine announces nothing for its
first steps, for steps with prompts, and for batch sizes that are new to it; then the long timeout
`stuck_after` applies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from mizzen.wire.client.engine_client import EngineLink


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Limits of health checks, in seconds."""

    suspect_after: float = 2.0
    """Time without a message after which an engine is suspect."""
    stuck_after: float = 60.0
    """Time without a step, while requests run, after which an engine is stuck; 0 means never."""
    min_stuck_after: float = 5.0
    """Shortest time after which an engine counts as stuck, even if it announces shorter steps."""

    @property
    def ping_after(self) -> float:
        """Time without a message after which an engine gets a ping; leaves some time for the answer."""
        return 0.8 * self.suspect_after

    @property
    def check_interval(self) -> float:
        """Interval between two health checks of an engine."""
        return max(0.02, self.suspect_after / 8)


class HealthCheck:
    """Detects when an engine does not respond."""

    __slots__ = ("_limits", "_pinged", "suspect")

    def __init__(self, limits: HealthLimits | None = None) -> None:
        self._limits = limits or HealthLimits()
        self._pinged = False
        self.suspect = False
        """True if the engine has been silent too long and has not answered a ping."""

    def check(self, link: EngineLink) -> bool:
        """Update `suspect`, and send a ping if one is due; return whether `suspect` changed."""
        quiet_seconds = link.quiet_seconds if link.welcome is not None else 0.0
        if quiet_seconds < self._limits.ping_after:
            self._pinged = False
        elif not self._pinged:
            self._pinged = True
            link.ping()
        was_suspect, self.suspect = self.suspect, self._pinged and quiet_seconds >= self._limits.suspect_after
        return was_suspect is not self.suspect


class StepProgress:
    """Detects, from the step count in an engine's load reports, that it runs requests but makes no steps."""

    __slots__ = ("_clock", "_limits", "_since", "_steps")

    def __init__(self, limits: HealthLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._steps: int | None = None
        self._since = 0.0

    def check_stuck(self, link: EngineLink, replaceable: bool = False) -> bool:
        """Return whether the engine is stuck; returning True restarts the measurement.

        `replaceable` is true if another engine could resume the answers, so that an error costs little.
        """
        stats, now = link.stats, self._clock()
        if stats is None or not stats.running or stats.steps != self._steps:
            self._steps, self._since = None if stats is None else stats.steps, now
            return False
        stuck_after = self._limits.stuck_after or math.inf
        if replaceable and stats.patience_seconds:
            stuck_after = min(stuck_after, max(self._limits.min_stuck_after, stats.patience_seconds))
        if now - self._since < stuck_after:
            return False
        self._since = now
        return True
