# SPDX-License-Identifier: Apache-2.0
"""Work queue of services: each key is queued at most once, and never processed twice at the same time."""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections.abc import Iterable

from mizzen_operator.api.key import ServiceKey
from mizzen_operator.manager.fair_queueing import ConcurrencyLimiter, Flow

FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 60.0
LOW_PRIORITY_WAIT_SECONDS = 30.0
FAILURE_HOLD_SECONDS = 1.0
"""Minimum time until a failed key is processed again, even after events; less if its back-off is shorter.

Without it, each event of a pod would repeat the failed attempt. A status may be out of date for this long.
"""


class WorkQueue:
    """Keys of services with the time at which each is due. Each is queued once, so the queue is bounded.

    Keys of changed services precede low-priority keys, which are queued just in case: a resync of a thousand
    services does not delay changes. A low-priority key that has been due for LOW_PRIORITY_WAIT_SECONDS
    precedes all others.

    A key whose flow has no free slot is parked, so that it does not block keys of other flows. When the flow
    has a free slot, its first parked key is queued again; the next one follows when that key has started.
    """

    def __init__(self, limiter: ConcurrencyLimiter) -> None:
        """Create an empty queue; `limiter` limits how many keys are processed at the same time."""
        self._limiter = limiter
        self._parked_heaps: dict[Flow, list[tuple[float, ServiceKey]]] = {}
        self._parked_keys: set[ServiceKey] = set()
        self._due: dict[ServiceKey, float] = {}
        self._low_priority: set[ServiceKey] = set()
        self._high_heap: list[tuple[float, ServiceKey]] = []
        self._low_heap: list[tuple[float, ServiceKey]] = []
        self._running: set[ServiceKey] = set()
        self._attempts: dict[ServiceKey, int] = {}
        self._hold_until: dict[ServiceKey, float] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def add(self, key: ServiceKey, delay: float = 0.0, *, low_priority: bool = False) -> None:
        """Queue a key for processing after a delay, unless it is already queued for an earlier time.

        Args:
            key: key of the service.
            delay: delay in seconds.
            low_priority: process other due keys first, unless the key already has normal priority.
        """
        if self._closed:
            return
        due = max(time.monotonic() + delay, self._hold_until.get(key, 0.0))
        scheduled = self._due.get(key, float("inf"))
        promotes = not low_priority and key in self._low_priority and delay <= 0
        if due >= scheduled and not promotes:
            return
        self._due[key] = min(due, scheduled)
        if not low_priority:
            self._low_priority.discard(key)
        elif scheduled == float("inf"):
            self._low_priority.add(key)
        if key not in self._running:
            self._push(key)

    async def get(self) -> ServiceKey:
        """Wait for a due key whose flow has a slot, and return it; the caller must call `done` for it."""
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
        """End the processing of a key; if it was added meanwhile, queue it again."""
        self._running.discard(key)
        flow = self._limiter.release(key, time.monotonic())
        if key in self._due:
            self._push(key)
        # The end of a slow reconcile may free a slot for slow ones of other namespaces.
        self._unpark([other for other in self._parked_heaps if other.slow] if flow.slow else [flow])
        self._changed.set()

    def requeue_failed(self, key: ServiceKey) -> float:
        """Queue a failed key with back-off; return the delay.

        Events may make the key due earlier, but not before FAILURE_HOLD_SECONDS have passed.
        """
        delay = self.requeue_with_backoff(key)
        hold_until = time.monotonic() + min(delay, FAILURE_HOLD_SECONDS)
        self._hold_until[key] = hold_until
        if key in self._due and self._due[key] < hold_until:  # it was added while it was processed
            self._due[key] = hold_until
        return delay

    def requeue_with_backoff(self, key: ServiceKey, limit: float = MAX_BACKOFF_SECONDS) -> float:
        """Queue a key with a delay that doubles with each retry, up to `limit` seconds; return the delay."""
        self._hold_until.pop(key, None)
        attempt = self._attempts.get(key, 0)
        self._attempts[key] = attempt + 1
        delay = min(limit, FIRST_BACKOFF_SECONDS * 2 ** min(attempt, 16))
        delay *= random.uniform(0.9, 1.1)
        self.add(key, delay)
        return delay

    def close(self) -> None:
        """Drop all queued keys, and accept no more."""
        self._closed = True
        for keys in (
            self._due,
            self._low_priority,
            self._high_heap,
            self._low_heap,
            self._parked_heaps,
            self._parked_keys,
        ):
            keys.clear()

    def reset_backoff(self, key: ServiceKey) -> None:
        """Reset the back-off of a key, whose reconcile has succeeded."""
        self._attempts.pop(key, None)
        self._hold_until.pop(key, None)

    def depth(self) -> int:
        """Return the number of keys that are due and not being processed."""
        now = time.monotonic()
        return sum(due <= now for key, due in self._due.items() if key not in self._running)

    def oldest_wait(self) -> float:
        """Return the seconds for which the longest waiting key has been due; 0 if no key is due."""
        due = [at for key, at in self._due.items() if key not in self._running]
        return max(0.0, time.monotonic() - min(due, default=float("inf")))

    def _push(self, key: ServiceKey) -> None:
        heapq.heappush(
            self._low_heap if key in self._low_priority else self._high_heap, (self._due[key], key)
        )
        self._changed.set()

    def poll(self) -> tuple[ServiceKey | None, float | None]:
        """Take a key that is due and whose flow has a slot, or return the time until there may be one.

        Returns:
            A key and None; or None and the seconds to wait; or twice None, if only a call of `add` or `done`
            can make a key available.
        """
        now = time.monotonic()
        if wait := self._limiter.seconds_until_slot(now):
            return None, None if wait == float("inf") else wait
        while True:
            high_due, low_due = (
                self._peek_due(self._high_heap, low_priority=False),
                self._peek_due(self._low_heap, low_priority=True),
            )
            if low_due - now <= -LOW_PRIORITY_WAIT_SECONDS or (high_due > now >= low_due):
                heap = self._low_heap
            elif high_due <= now:
                heap = self._high_heap
            else:
                wait = min(high_due, low_due) - now
                return None, None if wait == float("inf") else wait
            _, key = heapq.heappop(heap)
            flow = self._limiter.flow(key)
            if self._limiter.has_slot(flow):
                self._start(key, flow, now)
                return key, None
            self._park(key, flow)

    def _start(self, key: ServiceKey, flow: Flow, now: float) -> None:
        del self._due[key]
        self._low_priority.discard(key)
        self._parked_keys.discard(key)
        self._running.add(key)
        self._limiter.acquire(key, now)
        if self._limiter.has_slot(flow):
            self._unpark([flow])
        if self._due:
            self._changed.set()  # another caller of `get` may take the next key

    def _park(self, key: ServiceKey, flow: Flow) -> None:
        if key not in self._parked_keys:
            self._parked_keys.add(key)
            waits = self._due[key] + (LOW_PRIORITY_WAIT_SECONDS if key in self._low_priority else 0.0)
            heapq.heappush(self._parked_heaps.setdefault(flow, []), (waits, key))

    def _unpark(self, flows: Iterable[Flow]) -> None:
        """Queue the first parked key of each flow again."""
        for flow in flows:
            parked = self._parked_heaps.get(flow, [])
            while parked:
                _, key = heapq.heappop(parked)
                if key in self._parked_keys:
                    self._parked_keys.discard(key)
                    self._push(key)
                    break
            if not parked:
                self._parked_heaps.pop(flow, None)

    def _peek_due(self, heap: list[tuple[float, ServiceKey]], *, low_priority: bool) -> float:
        """Return the time at which the first key of a heap is due; infinity if the heap is empty.

        Entries of keys that were rescheduled or are being processed are dropped.
        """
        while heap:
            due, key = heap[0]
            if (
                self._due.get(key) == due
                and (key in self._low_priority) == low_priority
                and key not in self._running
            ):
                return due
            heapq.heappop(heap)
        return float("inf")
