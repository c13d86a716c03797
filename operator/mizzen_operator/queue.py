"""A keyed work queue: a key waits once however often it is added, and one worker at a time has it."""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from typing import NamedTuple

FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 60.0


class Key(NamedTuple):
    """Name of one InferenceService."""

    namespace: str
    name: str


class WorkQueue:
    """Keys with the time at which they are due; each is held once, so the number of services bounds it."""

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._running: set[Key] = set()
        self._attempts: dict[Key, int] = {}
        self._changed = asyncio.Event()

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Have a key worked on after `delay` seconds; an earlier time that was asked for before stands."""
        due = time.monotonic() + delay
        if due >= self._due.get(key, float("inf")):
            return
        self._due[key] = due
        if key not in self._running:
            self._push(due, key)

    async def get(self) -> Key:
        """Wait for the next due key and take it; every `get` is followed by `done`."""
        while True:
            key, wait = self._pop()
            if key is not None:
                self._running.add(key)
                return key
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), wait)
            except TimeoutError:
                pass

    def done(self, key: Key) -> None:
        """Give a key back; if it was added meanwhile, it waits again."""
        self._running.discard(key)
        if key in self._due:
            self._push(self._due[key], key)

    def retry(self, key: Key, limit: float = MAX_BACKOFF_SECONDS) -> float:
        """Add a key with a delay that doubles with each retry, up to `limit` seconds; returns the delay."""
        attempt = self._attempts.get(key, 0)
        self._attempts[key] = attempt + 1
        delay = min(limit, FIRST_BACKOFF_SECONDS * 2 ** min(attempt, 16))
        delay *= random.uniform(0.9, 1.1)
        self.add(key, delay)
        return delay

    def clear(self) -> None:
        """Drop every key that waits."""
        self._due.clear()
        self._heap.clear()

    def forget(self, key: Key) -> None:
        """Let the next retry of a key be its first."""
        self._attempts.pop(key, None)

    def depth(self) -> int:
        """Number of keys that are due and wait."""
        now = time.monotonic()
        return sum(due <= now for key, due in self._due.items() if key not in self._running)

    def age(self) -> float:
        """Seconds that the key which waits longest is overdue."""
        due = [at for key, at in self._due.items() if key not in self._running]
        return max(0.0, time.monotonic() - min(due, default=float("inf")))

    def _push(self, due: float, key: Key) -> None:
        heapq.heappush(self._heap, (due, key))
        self._changed.set()

    def _pop(self) -> tuple[Key | None, float | None]:
        """A due key, or the seconds until the next one; None for both when nothing waits."""
        while self._heap:
            due, key = self._heap[0]
            if self._due.get(key) != due or key in self._running:
                heapq.heappop(self._heap)  # was moved forward, or is pushed again when it is done
                continue
            wait = due - time.monotonic()
            if wait > 0:
                return None, wait
            heapq.heappop(self._heap)
            del self._due[key]
            if self._heap:
                self._changed.set()  # another worker may take the next one
            return key, None
        return None, None
