"""Health checks between two messages of an engine: detects unresponsive and stuck engines early.

Engines report their load once a second. An engine that was silent for `ping_after` gets a ping that its loop
must answer. One that was silent for `suspect_after`, with the ping unanswered, gets new requests only if no
other engine is left. That is long before its timeout (`engine_timeout_seconds`).

An engine that announces its longest step (`Stats.patience_seconds`) loses its requests as soon as a step
takes longer, if another engine can resume them. It makes no announcement for steps with prompts, for sizes
that are new to it, and for its first steps: those have the long timeout.
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
    """Silence after which an engine is suspect."""
    stuck_after: float = 60.0
    """Time without a step, while requests run, after which an engine is stuck; 0 is never."""
    min_stuck_after: float = 5.0
    """Shortest such time, however fast the engine's steps are."""

    @property
    def ping_after(self) -> float:
        """Silence after which an engine gets a ping; leaves some time for the answer."""
        return 0.8 * self.suspect_after

    @property
    def check_interval(self) -> float:
        """Interval of the checks."""
        return max(0.02, self.suspect_after / 8)


class HealthCheck:
    """Detects that one engine does not respond."""

    __slots__ = ("_limits", "_pinged", "suspect")

    def __init__(self, limits: HealthLimits | None = None) -> None:
        self._limits = limits or HealthLimits()
        self._pinged = False
        self.suspect = False
        """True if the engine should have sent something and did not."""

    def check(self, link: EngineLink) -> bool:
        """Send a ping if it is time; return whether `suspect` has changed."""
        quiet_seconds = link.quiet_seconds if link.welcome is not None else 0.0
        if quiet_seconds < self._limits.ping_after:
            self._pinged = False
        elif not self._pinged:
            self._pinged = True
            link.ping()
        was_suspect, self.suspect = self.suspect, self._pinged and quiet_seconds >= self._limits.suspect_after
        return was_suspect is not self.suspect


class StepProgress:
    """Detects that one engine makes no steps; it reports their count with its load."""

    __slots__ = ("_clock", "_limits", "_since", "_steps")

    def __init__(self, limits: HealthLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._steps: int | None = None
        self._since = 0.0

    def check_stuck(self, link: EngineLink, spare: bool = False) -> bool:
        """Return whether the engine is stuck; if so, the time starts again.

        `spare` says whether another engine could resume its answers, so that an error costs little.
        """
        stats, now = link.stats, self._clock()
        if stats is None or not stats.running or stats.steps != self._steps:
            self._steps, self._since = None if stats is None else stats.steps, now
            return False
        stuck_after = self._limits.stuck_after or math.inf
        if spare and stats.patience_seconds:
            stuck_after = min(stuck_after, max(self._limits.min_stuck_after, stats.patience_seconds))
        if now - self._since < stuck_after:
            return False
        self._since = now
        return True
