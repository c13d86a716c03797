"""Admission of one service's requests: limits on requests and tokens in flight, and a bounded fair queue.

The dispatcher enters and leaves for each sequence. A full queue evicts the newest entry of the tenant with
the most entries, so one tenant's burst cannot fill it.
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
    """Admits requests up to the engines' `capacity()` and the limits in flight; the others wait.

    `admit_waiting` must be called whenever capacity may have grown.
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
        """Number of sequences that wait for siblings to leave the queue."""
        self.in_flight = 0
        self.tokens_in_flight = 0
        """Tokens of admitted requests, as estimated at admission."""
        self.drained = asyncio.Event()
        """Set while no request is in flight."""
        self.drained.set()
        self.last_activity = time.monotonic()
        """Time when the last request left, on the monotonic clock."""
        self.closed_reason: str | None = None
        """Reason why requests no longer wait, once the gateway shuts down."""

    def __len__(self) -> int:
        return len(self._queue) + self._waiting_siblings

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last request left; 0 while one is in flight or waits."""
        return 0.0 if self.in_flight or self._queue else time.monotonic() - self.last_activity

    async def enter(self, entry: QueueEntry) -> None:
        """Wait until the entry is admitted; `leave` must follow.

        Raises:
            ApiError: 429 if the tenant has no tokens left or the queue is full, 503 if it is not admitted
                before its
                deadline.
        """
        if not entry.reserved:
            reserve_tokens((entry,))
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
        """Leave, and wait at the front of the queue to be admitted again, for at least `seconds`.

        Raises:
            ApiError: 503 if it is not admitted before its deadline.
        """
        self._count_out(entry)
        try:
            began = time.monotonic()
            await asyncio.sleep(max(0.0, min(seconds, entry.wait_deadline - began)))
            entry.waited_seconds += time.monotonic() - began
            # With free capacity it would be admitted again and again.
            if time.monotonic() >= entry.wait_deadline:
                raise unavailable(f"no engine took the request; waited {entry.waited_seconds:.1f} s")
            await self._wait(entry, front=True)
        except BaseException:
            self.settle(entry)
            raise

    def leave(self, entry: QueueEntry) -> None:
        """End the entry's time in flight, and charge the tokens that it used."""
        self.settle(entry)
        self._count_out(entry)

    def admit_waiting(self) -> None:
        """Admit waiting entries while there is capacity."""
        while (entry := self._queue.peek()) is not None and self._may_enter(entry):
            self._queue.pop()
            if entry.granted is not None and not entry.granted.done():
                self._count_in(entry)
                entry.granted.set_result(None)

    def close(self, reason: str) -> None:
        """Reject all waiting and future entries."""
        self.closed_reason = reason
        for entry in self._queue:
            if entry.granted is not None and not entry.granted.done():
                entry.granted.set_exception(unavailable(reason))
        self._queue.clear()

    def _may_enter(self, entry: QueueEntry) -> bool:
        """Return whether an entry may be admitted now.

        One that needs more tokens than the limit is admitted if nothing else is in flight.
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
        """Charge an entry the tokens that it used instead of those reserved for it, unless that was done."""
        if entry.reserved:
            entry.reserved = False
            entry.tenant.settle(entry.expected_tokens, entry.used_tokens)
            if entry.used_tokens:
                more = entry.used_tokens - entry.expected_tokens
                self._queue.charge(entry.tenant.name, entry.priority, more)

    def _evict_for(self, entry: QueueEntry) -> None:
        """Make room in the queue for one entry: a full queue evicts the newest entry of the tenant with the
        most.

        Entries whose request has begun are neither evicted nor refused; there are never more than are in
        flight.

        Raises:
            ApiError: 429 if no other tenant has more entries than this one.
        """
        if len(self._queue) < self._queue_size or entry.request_started:
            return
        error = queue_full(self._queue_size)
        newest = self._queue.newest_of_longest_group(
            entry.tenant.name, lambda queued: not queued.request_started
        )
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
        """Fail the wait of an entry when its deadline is over, which may have moved by then."""
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
        granted.set_exception(unavailable(f"{reason}; waited {time.monotonic() - began:.1f} s"))

    def _cancel_wait(self, entry: QueueEntry, granted: asyncio.Future[None]) -> None:
        if self._queue.remove(entry):
            return
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            self._count_out(entry)  # it was admitted at the same moment


def queue_full(size: int) -> ApiError:
    """Return the 429 of a full queue."""
    return ApiError(
        429,
        f"the queue is full: {size} requests are waiting; try again later",
        code="queue_full",
        retry_after_seconds=1.0,
    )
