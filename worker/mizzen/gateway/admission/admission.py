"""Admission: how many requests and tokens are in work, and a bounded queue that is fair between tenants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from mizzen.gateway.admission.fair_queue import FairQueue
from mizzen.gateway.admission.queue_entry import QueueEntry, reserve_tokens
from mizzen.gateway.admission.sibling_sequences import SiblingSequences
from mizzen.gateway.errors import ApiError, unavailable


class Admission:
    """Lets in as many requests as the engines have room for by `capacity()`, and as many tokens as it may.

    `poke` must be called whenever that may have grown.
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
        """Behind siblings that stand in the queue."""
        self.in_flight = 0
        self.tokens_in_flight = 0
        """As expected when they were let in."""
        self.drained = asyncio.Event()
        """Set while nothing is in work."""
        self.drained.set()
        self.last_activity = time.monotonic()
        """When the last request left."""
        self.closed_reason: str | None = None
        """Why nothing waits any more, once the gateway ends."""

    def __len__(self) -> int:
        return len(self._queue) + self._waiting_siblings

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last request left; 0 while one is in work or waits."""
        return 0.0 if self.in_flight or self._queue else time.monotonic() - self.last_activity

    async def enter(self, queue_entry: QueueEntry) -> None:
        """Wait for a turn; `leave` gives it back.

        Raises:
            ApiError: 429 when the tenant has no tokens left or the queue is full, 503 when the turn does not
                come before the deadline.
        """
        if not queue_entry.reserved:
            reserve_tokens((queue_entry,))
        try:
            if queue_entry.siblings is None:
                await self._enter(queue_entry)
            else:
                await self._enter_in_line(queue_entry, queue_entry.siblings)
        except BaseException:
            self.settle(queue_entry)
            raise

    async def _enter(self, queue_entry: QueueEntry) -> None:
        if not self._queue and self._may_enter(queue_entry):
            self._count_in(queue_entry)
            return
        self._evict_for(queue_entry)
        await self._wait(queue_entry, front=False)

    async def _enter_in_line(self, queue_entry: QueueEntry, siblings: SiblingSequences) -> None:
        began = time.monotonic()
        self._waiting_siblings += 1
        try:
            await siblings.queue_slots.acquire()
        finally:
            self._waiting_siblings -= 1
        try:
            queue_entry.waited_seconds += time.monotonic() - began
            queue_entry.deadline = max(queue_entry.deadline, time.monotonic() + siblings.seconds)
            await self._enter(queue_entry)
            siblings.started = True
        finally:
            siblings.queue_slots.release()

    async def requeue(self, queue_entry: QueueEntry, seconds: float) -> None:
        """Give the turn back and wait at the front of the queue for the next one, at least `seconds` long.

        Raises:
            ApiError: 503 when it does not come before the deadline.
        """
        self._count_out(queue_entry)
        try:
            began = time.monotonic()
            await asyncio.sleep(max(0.0, min(seconds, queue_entry.wait_deadline - began)))
            queue_entry.waited_seconds += time.monotonic() - began
            if (
                time.monotonic() >= queue_entry.wait_deadline
            ):  # a turn that is free would come at once, again and again
                raise unavailable(f"no engine took the request; waited {queue_entry.waited_seconds:.1f} s")
            await self._wait(queue_entry, front=True)
        except BaseException:
            self.settle(queue_entry)
            raise

    def leave(self, queue_entry: QueueEntry) -> None:
        """End a turn, and charge what was used."""
        self.settle(queue_entry)
        self._count_out(queue_entry)

    def admit_waiting(self) -> None:
        """Give turns to those who wait, while there is work for an engine."""
        while (queue_entry := self._queue.peek()) is not None and self._may_enter(queue_entry):
            self._queue.pop()
            if queue_entry.granted is not None and not queue_entry.granted.done():
                self._count_in(queue_entry)
                queue_entry.granted.set_result(None)

    def close(self, reason: str) -> None:
        """Refuse everyone who waits, and whoever would."""
        self.closed_reason = reason
        for queue_entry in self._queue:
            if queue_entry.granted is not None and not queue_entry.granted.done():
                queue_entry.granted.set_exception(unavailable(reason))
        self._queue.clear()

    def _may_enter(self, queue_entry: QueueEntry) -> bool:
        """Whether a ticket may go in now; one that needs more tokens than there may ever be goes alone."""
        if self.in_flight >= min(self._max_in_flight, self._capacity()):
            return False
        fits = self.tokens_in_flight + queue_entry.expected_tokens <= self._max_tokens
        return not self._max_tokens or fits or not self.in_flight

    def _count_in(self, queue_entry: QueueEntry) -> None:
        self.in_flight += 1
        self.drained.clear()
        self.tokens_in_flight += queue_entry.expected_tokens

    def _count_out(self, queue_entry: QueueEntry) -> None:
        self.in_flight -= 1
        self.last_activity = time.monotonic()
        self.tokens_in_flight -= queue_entry.expected_tokens
        if not self.in_flight:
            self.drained.set()
        self.admit_waiting()

    def settle(self, queue_entry: QueueEntry) -> None:
        """Charge a ticket what it has used of what was reserved for it, if something is."""
        if queue_entry.reserved:
            queue_entry.reserved = False
            queue_entry.tenant.settle(queue_entry.expected_tokens, queue_entry.used_tokens)
            if queue_entry.used_tokens:
                more = queue_entry.used_tokens - queue_entry.expected_tokens
                self._queue.charge(queue_entry.tenant.name, queue_entry.priority, more)

    def _evict_for(self, queue_entry: QueueEntry) -> None:
        """See that one more may wait: when the queue is full, whoever has most there loses the newest.

        Sequences whose request has begun are not lost by that. They are no more than what is in work.

        Raises:
            ApiError: 429; nobody has more there than this tenant.
        """
        if len(self._queue) < self._queue_size or queue_entry.request_started:
            return
        error = queue_full(self._queue_size)
        newest = self._queue.newest_of_longest_group(
            queue_entry.tenant.name, lambda one: not one.request_started
        )
        if newest is None:
            raise error
        self._queue.remove(newest)
        if newest.granted is not None and not newest.granted.done():
            newest.granted.set_exception(error)

    async def _wait(self, queue_entry: QueueEntry, front: bool) -> None:
        if self.closed_reason is not None:
            raise unavailable(self.closed_reason)
        queue_entry.granted = turn = asyncio.get_running_loop().create_future()
        if front:
            self._queue.push_front(queue_entry)
        else:
            cost = max(1, queue_entry.expected_tokens)
            self._queue.push(
                queue_entry, queue_entry.tenant.name, queue_entry.priority, cost, queue_entry.weight
            )
        began = time.monotonic()
        self.admit_waiting()
        if not turn.done():
            self._on_queue_change()
        self._check_deadline(queue_entry, turn, began)
        try:
            await turn
        except BaseException:
            self._cancel_wait(queue_entry, turn)
            raise
        finally:
            if queue_entry.deadline_timer is not None:
                queue_entry.deadline_timer.cancel()
            self.last_activity = time.monotonic()
            queue_entry.waited_seconds += time.monotonic() - began
            if not self._queue:
                self._on_queue_change()

    def _check_deadline(self, queue_entry: QueueEntry, turn: asyncio.Future[None], began: float) -> None:
        """End the wait for a turn when the ticket's time is over, which may be later by then."""
        left = queue_entry.wait_deadline - time.monotonic()
        if turn.done():
            return
        if left > 0:
            loop = asyncio.get_running_loop()
            queue_entry.deadline_timer = loop.call_later(left, self._check_deadline, queue_entry, turn, began)
            return
        self._queue.remove(queue_entry)
        why = (
            self._unavailable_reason()
            if self.in_flight < self._max_in_flight
            else "too many requests are in work"
        )
        turn.set_exception(unavailable(f"{why}; waited {time.monotonic() - began:.1f} s"))

    def _cancel_wait(self, queue_entry: QueueEntry, turn: asyncio.Future[None]) -> None:
        if self._queue.remove(queue_entry):
            return
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            self._count_out(queue_entry)  # the turn came in the same moment


def queue_full(size: int) -> ApiError:
    """Return the 429 of a queue that is full."""
    return ApiError(
        429,
        f"the queue is full: {size} requests are waiting; try again later",
        code="queue_full",
        retry_after_seconds=1.0,
    )
