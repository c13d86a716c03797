# SPDX-License-Identifier: Apache-2.0
"""Admission of one service's requests: limits on requests and tokens in flight, and a bounded fair queue.

The dispatcher calls `enter` before it places a sequence, and `leave` when the sequence has ended. A full
queue evicts the newest entry of the tenant with the most entries, so one tenant's burst cannot fill it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from mizzen.gateway.admission.fair_queue import FairQueue
from mizzen.gateway.admission.queue_entry import QueueEntry, reserve_tokens
from mizzen.gateway.admission.sibling_sequences import SiblingSequences
from mizzen.gateway.errors import ApiError, unavailable


class Admission:
    """Admits sequences while its limits and the engines' `capacity()` allow it; further sequences wait.

    `admit_waiting` must be called whenever `capacity()` may have grown.
    """

    def __init__(
        self,
        capacity: Callable[[], int],
        *,
        max_in_flight: int,
        queue_size: int,
        max_tokens_in_flight: int = 0,
        unavailable_reason: Callable[[], str] = lambda: "no engine is ready",
        on_queue_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._capacity = capacity
        self._unavailable_reason = unavailable_reason
        self._on_queue_change = on_queue_change
        self._max_in_flight = max_in_flight
        self._max_tokens = max_tokens_in_flight
        self._queue_size = queue_size
        self._queue: FairQueue[QueueEntry] = FairQueue()
        self._waiting_siblings = 0
        """Number of sequences that wait to enter the queue, because too many of their siblings are in it."""
        self.in_flight = 0
        self.tokens_in_flight = 0
        """Expected tokens of all admitted sequences, as estimated before admission."""
        self.drained = asyncio.Event()
        """Set while no sequence is in flight."""
        self.drained.set()
        self.last_activity = time.monotonic()
        """Time on the monotonic clock when a sequence last left the engines or the queue."""
        self.closed_reason: str | None = None
        """Reason why requests can no longer wait; None until `close` is called."""

    def __len__(self) -> int:
        return len(self._queue) + self._waiting_siblings

    @property
    def idle_seconds(self) -> float:
        """Seconds since `last_activity`; 0 while any sequence is in flight or waits."""
        return 0.0 if self.in_flight or self._queue else time.monotonic() - self.last_activity

    async def enter(self, entry: QueueEntry) -> None:
        """Wait until an entry is admitted; the caller must call `leave` when the sequence has ended.

        Raises:
            ApiError: 429 if the tenant does not have enough tokens left or the queue is full, 503 if the
                entry is not admitted before its deadline.
        """
        if not entry.reserved:
            await reserve_tokens((entry,))
        try:
            if entry.siblings is None:
                await self._enter(entry)
            else:
                await self._enter_with_siblings(entry, entry.siblings)
        except BaseException:
            self.settle(entry)
            raise

    async def _enter(self, entry: QueueEntry) -> None:
        if not self._queue and self._may_enter(entry):
            self._count_in(entry)
            return
        self._evict_for(entry)
        await self._wait(entry, front=False)

    async def _enter_with_siblings(self, entry: QueueEntry, siblings: SiblingSequences) -> None:
        began = time.monotonic()
        self._waiting_siblings += 1
        try:
            await siblings.queue_slots.acquire()
        finally:
            self._waiting_siblings -= 1
        try:
            entry.waited_seconds += time.monotonic() - began
            entry.deadline = max(entry.deadline, time.monotonic() + siblings.seconds)
            await self._enter(entry)
            siblings.started = True
        finally:
            siblings.queue_slots.release()

    async def requeue(self, entry: QueueEntry, seconds: float) -> None:
        """Release the place of an admitted entry, and wait until the entry is admitted again.

        The entry pauses for `seconds`, and then waits at the front of the queue.

        Raises:
            ApiError: 503 if the entry is not admitted again before its deadline.
        """
        self._count_out(entry)
        try:
            began = time.monotonic()
            await asyncio.sleep(max(0.0, min(seconds, entry.wait_deadline - began)))
            entry.waited_seconds += time.monotonic() - began
            # Without this check, free capacity would admit it again and again after its deadline.
            if time.monotonic() >= entry.wait_deadline:
                text = f"no engine took the request; it waited {entry.waited_seconds:.1f} s"
                raise unavailable(text)
            await self._wait(entry, front=True)
        except BaseException:
            self.settle(entry)
            raise

    def leave(self, entry: QueueEntry) -> None:
        """Release the place of an admitted entry, and charge the tokens that its sequence used."""
        self.settle(entry)
        self._count_out(entry)

    def admit_waiting(self) -> None:
        """Admit waiting entries, in the queue's order, until one does not fit."""
        while (entry := self._queue.peek()) is not None and self._may_enter(entry):
            self._queue.pop()
            if entry.granted is not None and not entry.granted.done():
                self._count_in(entry)
                entry.granted.set_result(None)

    def close(self, reason: str) -> None:
        """Reject all waiting entries, and from now on each entry that would have to wait."""
        self.closed_reason = reason
        for entry in self._queue:
            if entry.granted is not None and not entry.granted.done():
                entry.granted.set_exception(unavailable(reason))
        self._queue.clear()

    def _may_enter(self, entry: QueueEntry) -> bool:
        """Return whether an entry may be admitted now.

        If nothing else is in flight, an entry may be admitted even if it needs more tokens than the limit.
        """
        if self.in_flight >= min(self._max_in_flight, self._capacity()):
            return False
        fits = self.tokens_in_flight + entry.expected_tokens <= self._max_tokens
        return not self._max_tokens or fits or not self.in_flight

    def _count_in(self, entry: QueueEntry) -> None:
        self.in_flight += 1
        self.drained.clear()
        self.tokens_in_flight += entry.expected_tokens

    def _count_out(self, entry: QueueEntry) -> None:
        self.in_flight -= 1
        self.last_activity = time.monotonic()
        self.tokens_in_flight -= entry.expected_tokens
        if not self.in_flight:
            self.drained.set()
        self.admit_waiting()

    def settle(self, entry: QueueEntry) -> None:
        """Charge the tokens that an entry used, and end its reservation; a second call has no effect."""
        if entry.reserved:
            entry.reserved = False
            entry.tenant.settle(entry.expected_tokens, entry.used_tokens)
            if entry.used_tokens:
                more = entry.used_tokens - entry.expected_tokens
                self._queue.charge(entry.tenant.name, entry.priority, more)

    def _evict_for(self, entry: QueueEntry) -> None:
        """If the queue is full, evict the newest entry of the tenant with the most entries.

        If a request has already begun, its entries are neither evicted nor refused, so the queue may exceed
        its size. Each such request adds at most `MAX_IN_QUEUE` entries.

        Raises:
            ApiError: 429 if the queue is full and no tenant has more entries than this entry's tenant
                would have.
        """
        if len(self._queue) < self._queue_size or entry.request_started:
            return
        error = queue_full(self._queue_size)
        newest = self._queue.choose_victim(entry.tenant.name, lambda queued: not queued.request_started)
        if newest is None:
            raise error
        self._queue.remove(newest)
        if newest.granted is not None and not newest.granted.done():
            newest.granted.set_exception(error)

    async def _wait(self, entry: QueueEntry, front: bool) -> None:
        if self.closed_reason is not None:
            raise unavailable(self.closed_reason)
        entry.granted = granted = asyncio.get_running_loop().create_future()
        if front:
            self._queue.push_front(entry)
        else:
            cost = max(1, entry.expected_tokens)
            self._queue.push(entry, entry.tenant.name, entry.priority, cost, entry.weight)
        began = time.monotonic()
        self.admit_waiting()
        if not granted.done():
            self._on_queue_change()
        self._check_deadline(entry, granted, began)
        try:
            await granted
        except BaseException:
            self._cancel_wait(entry, granted)
            raise
        finally:
            if entry.deadline_timer is not None:
                entry.deadline_timer.cancel()
            self.last_activity = time.monotonic()
            entry.waited_seconds += time.monotonic() - began
            if not self._queue:
                self._on_queue_change()

    def _check_deadline(self, entry: QueueEntry, granted: asyncio.Future[None], began: float) -> None:
        """Reject a waiting entry at its deadline; if the deadline was extended, check again later."""
        left = entry.wait_deadline - time.monotonic()
        if granted.done():
            return
        if left > 0:
            loop = asyncio.get_running_loop()
            entry.deadline_timer = loop.call_later(left, self._check_deadline, entry, granted, began)
            return
        self._queue.remove(entry)
        reason = (
            self._unavailable_reason()
            if self.in_flight < self._max_in_flight
            else "too many requests are in progress"
        )
        granted.set_exception(unavailable(f"{reason}; the request waited {time.monotonic() - began:.1f} s"))

    def _cancel_wait(self, entry: QueueEntry, granted: asyncio.Future[None]) -> None:
        if self._queue.remove(entry):
            return
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            self._count_out(entry)  # admitted at the moment when the wait was cancelled


def queue_full(size: int) -> ApiError:
    """Return the 429 error for a full queue of `size` entries."""
    return ApiError(
        429,
        f"the queue is full: {size} requests are waiting; try again later",
        code="queue_full",
        retry_after_seconds=1.0,
    )
