"""Health between two words of an engine: one that should have been heard is asked, and suspected early.

Engines say how busy they are once a second. One that has not been heard for `ask_after` gets a question that
its loop must answer; one that has not been heard for `suspect_after`, with the question open, gets new
requests only where no other engine is left, long before its time-out (`engine_timeout_seconds`) says that it
is silent.
"""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.wire.client import Link


@dataclass(frozen=True, slots=True)
class SuspicionLimits:
    """In seconds without a word."""

    suspect_after: float = 2.0

    @property
    def ask_after(self) -> float:
        """Leaves the answer a little time."""
        return 0.8 * self.suspect_after

    @property
    def look_every(self) -> float:
        """How often engines are looked at."""
        return max(0.02, self.suspect_after / 8)


class Suspicion:
    """What is thought of one engine."""

    __slots__ = ("_asked", "_limits", "suspect")

    def __init__(self, limits: SuspicionLimits | None = None) -> None:
        self._limits = limits or SuspicionLimits()
        self._asked = False
        self.suspect = False
        """Whether it should have been heard, and was not."""

    def look(self, link: Link) -> bool:
        """Ask where it is time to; tell whether `suspect` has changed."""
        quiet = link.quiet_seconds if link.welcome is not None else 0.0
        if quiet < self._limits.ask_after:
            self._asked = False
        elif not self._asked:
            self._asked = True
            link.ping()
        before, self.suspect = self.suspect, self._asked and quiet >= self._limits.suspect_after
        return before is not self.suspect
