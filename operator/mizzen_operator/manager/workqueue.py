"""A keyed work queue: a key waits once however often it is added, and is worked on once at a time."""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections.abc import Iterable

from mizzen_operator.api.key import ServiceKey
from mizzen_operator.manager.fair_queueing import Lane, Turns

FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 60.0
PATIENCE_SECONDS = 30.0
HOLD_SECONDS = 1.0
"""How long a key that has failed waits at least, once its retries are so far apart, whatever happens
meanwhile: each event of a pod would have the same tried again. Its status may be so old then."""


class WorkQueue:
    """Keys with the time at which they are due; each is held once, so the number of services bounds it.

    What has changed goes before what is looked at to be on the safe side, `aside`: a sweep over a thousand
    services holds nobody up. What has waited aside for PATIENCE_SECONDS waits like the others from then on.

    A key whose lane has no turn left is parked, so that nobody meets it on the way to others. When the lane
    has one again, the first that is parked there waits among the others, and the next once that one is taken.
    """

    def __init__(self, turns: Turns) -> None:
        """Share the turns of those who `get` keys."""
        self._turns = turns
        self._parked: dict[Lane, list[tuple[float, ServiceKey]]] = {}
        self._is_parked: set[ServiceKey] = set()
        self._due: dict[ServiceKey, float] = {}
        self._aside: set[ServiceKey] = set()
        self._first: list[tuple[float, ServiceKey]] = []
        self._later: list[tuple[float, ServiceKey]] = []
        self._running: set[ServiceKey] = set()
        self._attempts: dict[ServiceKey, int] = {}
        self._held: dict[ServiceKey, float] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def add(self, key: ServiceKey, delay: float = 0.0, *, aside: bool = False) -> None:
        """Have a key worked on after `delay` seconds; an earlier time that was asked for before stands.

        Args:
            key: what to work on.
            delay: in seconds.
            aside: others that are due go first, unless the key waits among them already.
        """
        if self._closed:
            return
        due = max(time.monotonic() + delay, self._held.get(key, 0.0))
        known = self._due.get(key, float("inf"))
        ahead = not aside and key in self._aside and delay <= 0
        if due >= known and not ahead:
            return
        self._due[key] = min(due, known)
        if not aside:
            self._aside.discard(key)
        elif known == float("inf"):
            self._aside.add(key)
        if key not in self._running:
            self._push(key)

    async def get(self) -> ServiceKey:
        """Wait for the next due key and take it; every `get` is followed by `done`."""
        while True:
            key, wait = self.poll()
            if key is not None:
                return key
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), wait)
            except TimeoutError:
                pass

    def done(self, key: ServiceKey) -> None:
        """Give a key back; if it was added meanwhile, it waits again."""
        self._running.discard(key)
        lane = self._turns.end(key, time.monotonic())
        if key in self._due:
            self._push(key)
        # A slow look's end may be what slow ones of other namespaces wait for.
        self._unpark([other for other in self._parked if other.slow] if lane.slow else [lane])
        self._changed.set()

    def fail(self, key: ServiceKey) -> float:
        """Add a key whose work has failed, as `retry` does; for HOLD_SECONDS nothing has it sooner."""
        delay = self.retry(key)
        held = time.monotonic() + min(delay, HOLD_SECONDS)
        self._held[key] = held
        if key in self._due and self._due[key] < held:  # it was added while it was worked on
            self._due[key] = held
        return delay

    def retry(self, key: ServiceKey, limit: float = MAX_BACKOFF_SECONDS) -> float:
        """Add a key with a delay that doubles with each retry, up to `limit` seconds; returns the delay."""
        self._held.pop(key, None)
        attempt = self._attempts.get(key, 0)
        self._attempts[key] = attempt + 1
        delay = min(limit, FIRST_BACKOFF_SECONDS * 2 ** min(attempt, 16))
        delay *= random.uniform(0.9, 1.1)
        self.add(key, delay)
        return delay

    def close(self) -> None:
        """Drop every key that waits, and take none any more."""
        self._closed = True
        for held in (self._due, self._aside, self._first, self._later, self._parked, self._is_parked):
            held.clear()

    def forget(self, key: ServiceKey) -> None:
        """Let the next retry of a key be its first."""
        self._attempts.pop(key, None)
        self._held.pop(key, None)

    def depth(self) -> int:
        """Number of keys that are due and wait."""
        now = time.monotonic()
        return sum(due <= now for key, due in self._due.items() if key not in self._running)

    def age(self) -> float:
        """Seconds that the key which waits longest is overdue."""
        due = [at for key, at in self._due.items() if key not in self._running]
        return max(0.0, time.monotonic() - min(due, default=float("inf")))

    def _push(self, key: ServiceKey) -> None:
        heapq.heappush(self._later if key in self._aside else self._first, (self._due[key], key))
        self._changed.set()

    def poll(self) -> tuple[ServiceKey | None, float | None]:
        """Take a due key, or tell the seconds until there may be one; None where only a change tells."""
        now = time.monotonic()
        if wait := self._turns.seconds_until_free(now):
            return None, None if wait == float("inf") else wait
        while True:
            first, later = self._head(self._first, aside=False), self._head(self._later, aside=True)
            if later - now <= -PATIENCE_SECONDS or (first > now >= later):
                heap = self._later
            elif first <= now:
                heap = self._first
            else:
                wait = min(first, later) - now
                return None, None if wait == float("inf") else wait
            _, key = heapq.heappop(heap)
            lane = self._turns.lane(key)
            if self._turns.open(lane):
                self._take(key, lane, now)
                return key, None
            self._park(key, lane)

    def _take(self, key: ServiceKey, lane: Lane, now: float) -> None:
        del self._due[key]
        self._aside.discard(key)
        self._is_parked.discard(key)
        self._running.add(key)
        self._turns.begin(key, now)
        if self._turns.open(lane):
            self._unpark([lane])
        if self._due:
            self._changed.set()  # who waits besides may take the next one

    def _park(self, key: ServiceKey, lane: Lane) -> None:
        if key not in self._is_parked:
            self._is_parked.add(key)
            waits = self._due[key] + (PATIENCE_SECONDS if key in self._aside else 0.0)
            heapq.heappush(self._parked.setdefault(lane, []), (waits, key))

    def _unpark(self, lanes: Iterable[Lane]) -> None:
        """Let the first key that is parked of each lane wait among the others again."""
        for lane in lanes:
            parked = self._parked.get(lane, [])
            while parked:
                _, key = heapq.heappop(parked)
                if key in self._is_parked:
                    self._is_parked.discard(key)
                    self._push(key)
                    break
            if not parked:
                self._parked.pop(lane, None)

    def _head(self, heap: list[tuple[float, ServiceKey]], *, aside: bool) -> float:
        """When the first key of a heap is due; entries are dropped that were moved or are under way."""
        while heap:
            due, key = heap[0]
            if self._due.get(key) == due and (key in self._aside) == aside and key not in self._running:
                return due
            heapq.heappop(heap)
        return float("inf")
