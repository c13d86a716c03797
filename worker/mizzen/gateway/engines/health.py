"""Health between two words of an engine: one that should have been heard is asked, and suspected early.

Engines say how busy they are once a second. One that has not been heard for `ask_after` gets a question that
its loop must answer; one that has not been heard for `suspect_after`, with the question open, gets new
requests only where no other engine is left, long before its time-out (`engine_timeout_seconds`) says that it
is silent.

An engine that says how long its steps take at most (`Stats.patience_seconds`) is given up as soon as one
takes longer, where another can go on with its answers. It says nothing of steps with prompts, of sizes that
are new to it, and of its first ones: those have the long time-out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from mizzen.wire.client.engine_client import EngineLink


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """In seconds without a word."""

    suspect_after: float = 2.0
    stuck_after: float = 60.0
    """Without a step while requests run; 0 is never."""
    min_stuck_after: float = 5.0
    """However fast the engine's steps are."""

    @property
    def ping_after(self) -> float:
        """Leaves the answer a little time."""
        return 0.8 * self.suspect_after

    @property
    def check_interval(self) -> float:
        """How often engines are looked at."""
        return max(0.02, self.suspect_after / 8)


class HealthCheck:
    """What is thought of one engine."""

    __slots__ = ("_asked", "_limits", "suspect")

    def __init__(self, limits: HealthLimits | None = None) -> None:
        self._limits = limits or HealthLimits()
        self._asked = False
        self.suspect = False
        """Whether it should have been heard, and was not."""

    def check(self, link: EngineLink) -> bool:
        """Ask where it is time to; tell whether `suspect` has changed."""
        quiet = link.quiet_seconds if link.welcome is not None else 0.0
        if quiet < self._limits.ping_after:
            self._asked = False
        elif not self._asked:
            self._asked = True
            link.ping()
        before, self.suspect = self.suspect, self._asked and quiet >= self._limits.suspect_after
        return before is not self.suspect


class StepProgress:
    """Whether an engine goes on: it counts its steps, and says so with how busy it is."""

    __slots__ = ("_clock", "_limits", "_since", "_steps")

    def __init__(self, limits: HealthLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._steps: int | None = None
        self._since = 0.0

    def check_stuck(self, link: EngineLink, spare: bool = False) -> bool:
        """Tell whether it is stuck; when it was, the time begins again.

        `spare`: another engine could go on with its answers, so that little is lost by an error.
        """
        stats, now = link.stats, self._clock()
        if stats is None or not stats.running or stats.steps != self._steps:
            self._steps, self._since = None if stats is None else stats.steps, now
            return False
        most = self._limits.stuck_after or math.inf
        if spare and stats.patience_seconds:
            most = min(most, max(self._limits.min_stuck_after, stats.patience_seconds))
        if now - self._since < most:
            return False
        self._since = now
        return True
