"""How many looks may be under way at once, and how namespaces share them.

A look that waits for an answer costs next to nothing, and may wait for long: half a minute for an admission
webhook that does not answer. So looks that take long are counted apart, and neither they nor those of one
namespace keep another namespace's from their turn.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

SLOW_SECONDS = 1.0
QUICK_SHARE, SLOW_SHARE, ALL_SHARE = 2, 4, 8
"""Times a namespace's turns: those of all namespaces for quick looks, for slow ones, and for both together.

The first is two, so that one namespace leaves others as many as it has. The last also bounds looks that begin
as quick ones and turn out slow.
"""

Name = tuple[str, str]
"""Namespace and name of a service."""


class Lane(NamedTuple):
    """What shares turns: a namespace's services whose last look was slow, or its others."""

    namespace: str
    slow: bool


class Turns:
    """The looks under way. Times are in seconds of one clock."""

    def __init__(self, each: int) -> None:
        """Give each namespace's quick looks, and its slow ones, so many turns."""
        self._each = each
        self._slow: set[Name] = set()
        """Services whose last look was slow."""
        self._running: dict[Name, tuple[Lane, float]] = {}
        self._lanes: Counter[Lane] = Counter()
        self._all_slow = 0

    def lane(self, key: Name) -> Lane:
        """Where a service's next look belongs; only the end of a look of its own changes that."""
        return Lane(key[0], key in self._slow)

    def seconds_until_free(self, now: float) -> float:
        """When another look may begin at all: 0 is now, infinity when one of them has to end."""
        if len(self._running) >= ALL_SHARE * self._each:
            return float("inf")
        quick = [
            began for lane, began in self._running.values() if not lane.slow and began > now - SLOW_SECONDS
        ]
        more = len(quick) - QUICK_SHARE * self._each
        return 0.0 if more < 0 else sorted(quick)[more] + SLOW_SECONDS - now

    def open(self, lane: Lane) -> bool:
        """Whether a lane has a turn left."""
        if lane.slow and self._all_slow >= SLOW_SHARE * self._each:
            return False
        return self._lanes[lane] < self._each

    def begin(self, key: Name, now: float) -> None:
        """A look at a service begins."""
        lane = self.lane(key)
        self._running[key] = (lane, now)
        self._lanes[lane] += 1
        self._all_slow += lane.slow

    def end(self, key: Name, now: float) -> Lane:
        """A look at a service ends; returns the lane that has its turn back."""
        lane, began = self._running.pop(key)
        self._lanes[lane] -= 1
        if not self._lanes[lane]:
            del self._lanes[lane]
        self._all_slow -= lane.slow
        if now - began > SLOW_SECONDS:
            self._slow.add(key)
        else:
            self._slow.discard(key)
        return lane
