"""Admission: how many requests and tokens are in work, and a bounded queue that is fair between tenants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mizzen.gateway.errors import ApiError, unavailable
from mizzen.gateway.tenants.fair import FairQueue
from mizzen.gateway.tenants.tenant import Tenant, everyone

NOBODY = everyone()
"""Whose a request is that nobody has asked about."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A place in the queue, kept over all attempts of a request."""

    deadline: float
    """Seconds of the monotonic clock; waiting ends then."""
    tenant: Tenant = NOBODY
    priority: int = 0
    expected_tokens: int = 1
    """Of prompt and answer, as far as can be said before tokenizing."""
    charges_prompt: bool = True
    """Whether its tenant is charged for the prompt: one ticket of a request is."""
    prompt_tokens: int = 0
    """Set once they are known; charged when the ticket ends,"""
    output_tokens: int = 0
    """with what the client got of the engine."""
    served: bool = False
    """Whether an engine has done its work without giving a token, as for an embedding."""
    waited: float = 0.0
    turn: asyncio.Future[None] | None = field(default=None, repr=False)
    reserved: bool = field(default=False, repr=False)
    """Whether its tenant's tokens are taken, until it is settled."""

    @property
    def used_tokens(self) -> int:
        """What is charged: nothing for a request that no engine did anything for."""
        if not self.output_tokens and not self.served:
            return 0
        return self.output_tokens + (self.prompt_tokens if self.charges_prompt else 0)

    @property
    def share(self) -> float:
        """Its weight in the queue: each step of priority doubles it."""
        return self.tenant.weight * 2.0**self.priority


def reserve(tickets: Sequence[Ticket]) -> None:
    """Take from a tenant what all sequences of one request are expected to use, before one of them begins.

    `Admission.leave` settles those that were let in, `Admission.settle` all others: what one of them uses
    beyond that is a debt of the next request, and ends none of this one's.

    Raises:
        ApiError: 429; then nothing is taken.
    """
    if tickets:
        tickets[0].tenant.reserve(sum(ticket.expected_tokens for ticket in tickets))
        for ticket in tickets:
            ticket.reserved = True


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
        return len(self._queue)

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
            if not self._queue and self._free(ticket):
                self._let_in(ticket)
                return
            self._make_room(ticket)
            await self._wait(ticket, front=False)
        except BaseException:
            self.settle(ticket)
            raise

    async def again(self, ticket: Ticket, seconds: float) -> None:
        """Give the turn back and wait at the front of the queue for the next one, at least `seconds` long.

        Raises:
            ApiError: 503 when it does not come before the deadline.
        """
        self._let_out(ticket)
        try:
            began = time.monotonic()
            await asyncio.sleep(max(0.0, min(seconds, ticket.deadline - began)))
            ticket.waited += time.monotonic() - began
            if time.monotonic() >= ticket.deadline:  # a turn that is free would come at once, again and again
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

        Raises:
            ApiError: 429; nobody has more there than this tenant.
        """
        if len(self._queue) < self._queue_size:
            return
        error = queue_full(self._queue_size)
        newest = self._queue.last_of_longest(ticket.tenant.name)
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
        try:
            async with asyncio.timeout(max(0.0, ticket.deadline - began)):
                await turn
        except TimeoutError:
            self._give_up(ticket, turn)
            why = self._why() if self.in_flight < self._max_in_flight else "too many requests are in work"
            raise unavailable(f"{why}; waited {time.monotonic() - began:.1f} s") from None
        except asyncio.CancelledError:
            self._give_up(ticket, turn)
            raise
        finally:
            self.quiet_since = time.monotonic()
            ticket.waited += time.monotonic() - began
            if not self._queue:
                self._on_wait()

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
