"""Admission: how many requests and tokens are in work, and a bounded queue that is fair between tenants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from mizzen.gateway.admission.fair_queue import FairQueue
from mizzen.gateway.admission.queue_entry import NOBODY, Ticket, reserve
from mizzen.gateway.admission.sibling_sequences import Siblings
from mizzen.gateway.errors import ApiError, unavailable

__all__ = ["NOBODY", "Admission", "Ticket", "queue_full", "reserve"]


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
        why_closed: Callable[[], str] = lambda: "no engine is ready",
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._capacity = capacity
        self._why = why_closed
        self._on_wait = on_wait
        self._max_in_flight = max_in_flight
        self._max_tokens = max_tokens_in_flight
        self._queue_size = queue_size
        self._queue: FairQueue[Ticket] = FairQueue()
        self._in_line = 0
        """Behind siblings that stand in the queue."""
        self.in_flight = 0
        self.tokens_in_flight = 0
        """As expected when they were let in."""
        self.empty = asyncio.Event()
        """Set while nothing is in work."""
        self.empty.set()
        self.quiet_since = time.monotonic()
        """When the last request left."""
        self.closed: str | None = None
        """Why nothing waits any more, once the gateway ends."""

    def __len__(self) -> int:
        return len(self._queue) + self._in_line

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last request left; 0 while one is in work or waits."""
        return 0.0 if self.in_flight or self._queue else time.monotonic() - self.quiet_since

    async def enter(self, ticket: Ticket) -> None:
        """Wait for a turn; `leave` gives it back.

        Raises:
            ApiError: 429 when the tenant has no tokens left or the queue is full, 503 when the turn does not
                come before the deadline.
        """
        if not ticket.reserved:
            reserve((ticket,))
        try:
            if ticket.siblings is None:
                await self._enter(ticket)
            else:
                await self._enter_in_line(ticket, ticket.siblings)
        except BaseException:
            self.settle(ticket)
            raise

    async def _enter(self, ticket: Ticket) -> None:
        if not self._queue and self._free(ticket):
            self._let_in(ticket)
            return
        self._make_room(ticket)
        await self._wait(ticket, front=False)

    async def _enter_in_line(self, ticket: Ticket, siblings: Siblings) -> None:
        began = time.monotonic()
        self._in_line += 1
        try:
            await siblings.line.acquire()
        finally:
            self._in_line -= 1
        try:
            ticket.waited += time.monotonic() - began
            ticket.deadline = max(ticket.deadline, time.monotonic() + siblings.seconds)
            await self._enter(ticket)
            siblings.entered = True
        finally:
            siblings.line.release()

    async def again(self, ticket: Ticket, seconds: float) -> None:
        """Give the turn back and wait at the front of the queue for the next one, at least `seconds` long.

        Raises:
            ApiError: 503 when it does not come before the deadline.
        """
        self._let_out(ticket)
        try:
            began = time.monotonic()
            await asyncio.sleep(max(0.0, min(seconds, ticket.ends - began)))
            ticket.waited += time.monotonic() - began
            if time.monotonic() >= ticket.ends:  # a turn that is free would come at once, again and again
                raise unavailable(f"no engine took the request; waited {ticket.waited:.1f} s")
            await self._wait(ticket, front=True)
        except BaseException:
            self.settle(ticket)
            raise

    def leave(self, ticket: Ticket) -> None:
        """End a turn, and charge what was used."""
        self.settle(ticket)
        self._let_out(ticket)

    def poke(self) -> None:
        """Give turns to those who wait, while there is work for an engine."""
        while (ticket := self._queue.peek()) is not None and self._free(ticket):
            self._queue.pop()
            if ticket.turn is not None and not ticket.turn.done():
                self._let_in(ticket)
                ticket.turn.set_result(None)

    def close(self, reason: str) -> None:
        """Refuse everyone who waits, and whoever would."""
        self.closed = reason
        for ticket in self._queue:
            if ticket.turn is not None and not ticket.turn.done():
                ticket.turn.set_exception(unavailable(reason))
        self._queue.clear()

    def _free(self, ticket: Ticket) -> bool:
        """Whether a ticket may go in now; one that needs more tokens than there may ever be goes alone."""
        if self.in_flight >= min(self._max_in_flight, self._capacity()):
            return False
        fits = self.tokens_in_flight + ticket.expected_tokens <= self._max_tokens
        return not self._max_tokens or fits or not self.in_flight

    def _let_in(self, ticket: Ticket) -> None:
        self.in_flight += 1
        self.empty.clear()
        self.tokens_in_flight += ticket.expected_tokens

    def _let_out(self, ticket: Ticket) -> None:
        self.in_flight -= 1
        self.quiet_since = time.monotonic()
        self.tokens_in_flight -= ticket.expected_tokens
        if not self.in_flight:
            self.empty.set()
        self.poke()

    def settle(self, ticket: Ticket) -> None:
        """Charge a ticket what it has used of what was reserved for it, if something is."""
        if ticket.reserved:
            ticket.reserved = False
            ticket.tenant.settle(ticket.expected_tokens, ticket.used_tokens)
            if ticket.used_tokens:
                more = ticket.used_tokens - ticket.expected_tokens
                self._queue.correct(ticket.tenant.name, ticket.priority, more)

    def _make_room(self, ticket: Ticket) -> None:
        """See that one more may wait: when the queue is full, whoever has most there loses the newest.

        Sequences whose request has begun are not lost by that. They are no more than what is in work.

        Raises:
            ApiError: 429; nobody has more there than this tenant.
        """
        if len(self._queue) < self._queue_size or ticket.entered:
            return
        error = queue_full(self._queue_size)
        newest = self._queue.last_of_longest(ticket.tenant.name, lambda one: not one.entered)
        if newest is None:
            raise error
        self._queue.remove(newest)
        if newest.turn is not None and not newest.turn.done():
            newest.turn.set_exception(error)

    async def _wait(self, ticket: Ticket, front: bool) -> None:
        if self.closed is not None:
            raise unavailable(self.closed)
        ticket.turn = turn = asyncio.get_running_loop().create_future()
        if front:
            self._queue.push_front(ticket)
        else:
            cost = max(1, ticket.expected_tokens)
            self._queue.push(ticket, ticket.tenant.name, ticket.priority, cost, ticket.share)
        began = time.monotonic()
        self.poke()
        if not turn.done():
            self._on_wait()
        self._limit(ticket, turn, began)
        try:
            await turn
        except BaseException:
            self._give_up(ticket, turn)
            raise
        finally:
            if ticket.limit is not None:
                ticket.limit.cancel()
            self.quiet_since = time.monotonic()
            ticket.waited += time.monotonic() - began
            if not self._queue:
                self._on_wait()

    def _limit(self, ticket: Ticket, turn: asyncio.Future[None], began: float) -> None:
        """End the wait for a turn when the ticket's time is over, which may be later by then."""
        left = ticket.ends - time.monotonic()
        if turn.done():
            return
        if left > 0:
            loop = asyncio.get_running_loop()
            ticket.limit = loop.call_later(left, self._limit, ticket, turn, began)
            return
        self._queue.remove(ticket)
        why = self._why() if self.in_flight < self._max_in_flight else "too many requests are in work"
        turn.set_exception(unavailable(f"{why}; waited {time.monotonic() - began:.1f} s"))

    def _give_up(self, ticket: Ticket, turn: asyncio.Future[None]) -> None:
        if self._queue.remove(ticket):
            return
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            self._let_out(ticket)  # the turn came in the same moment


def queue_full(size: int) -> ApiError:
    """Return the 429 of a queue that is full."""
    return ApiError(
        429,
        f"the queue is full: {size} requests are waiting; try again later",
        code="queue_full",
        retry_after_seconds=1.0,
    )
