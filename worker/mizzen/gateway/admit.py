"""Admission: how many requests are in work, and a bounded queue, first come first served, for the others."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mizzen.gateway.errors import ApiError, unavailable


@dataclass(slots=True, eq=False)
class Ticket:
    """A place in the queue, kept over all attempts of a request."""

    deadline: float
    """Seconds of the monotonic clock; waiting ends then."""
    waited: float = 0.0
    turn: asyncio.Future[None] | None = field(default=None, repr=False)


class Admission:
    """Lets in as many requests as the engines have room for by `capacity()`.

    `poke` must be called whenever that may have grown.
    """

    def __init__(
        self,
        capacity: Callable[[], int],
        *,
        max_in_flight: int,
        queue_size: int,
        why_closed: Callable[[], str] = lambda: "no engine is ready",
    ) -> None:
        self._capacity = capacity
        self._why = why_closed
        self._max_in_flight = max_in_flight
        self._queue_size = queue_size
        self._queue: deque[Ticket] = deque()
        self.in_flight = 0
        self.closed: str | None = None
        """Why nothing waits any more, once the gateway ends."""

    def __len__(self) -> int:
        return len(self._queue)

    async def enter(self, ticket: Ticket) -> None:
        """Wait for a turn; `leave` gives it back.

        Raises:
            ApiError: 429 when the queue is full, 503 when the turn does not come before the deadline.
        """
        if not self._queue and self._free():
            self.in_flight += 1
            return
        if len(self._queue) >= self._queue_size:
            raise ApiError(
                429,
                f"the queue is full: {self._queue_size} requests are waiting; try again later",
                code="queue_full",
                retry_after_seconds=1.0,
            )
        await self._wait(ticket, front=False)

    async def again(self, ticket: Ticket, seconds: float) -> None:
        """Give the turn back and wait at the front of the queue for the next one, at least `seconds` long.

        Raises:
            ApiError: 503 when it does not come before the deadline.
        """
        self.leave()
        began = time.monotonic()
        await asyncio.sleep(max(0.0, min(seconds, ticket.deadline - began)))
        ticket.waited += time.monotonic() - began
        if time.monotonic() >= ticket.deadline:  # a turn that is free would come at once, again and again
            raise unavailable(f"no engine took the request; waited {ticket.waited:.1f} s")
        await self._wait(ticket, front=True)

    def leave(self) -> None:
        """End a turn."""
        self.in_flight -= 1
        self.poke()

    def poke(self) -> None:
        """Give turns to those who wait, while there is work for an engine."""
        while self._queue and self._free():
            ticket = self._queue.popleft()
            if ticket.turn is not None and not ticket.turn.done():
                self.in_flight += 1
                ticket.turn.set_result(None)

    def close(self, reason: str) -> None:
        """Refuse everyone who waits, and whoever would."""
        self.closed = reason
        for ticket in self._queue:
            if ticket.turn is not None and not ticket.turn.done():
                ticket.turn.set_exception(unavailable(reason))
        self._queue.clear()

    def _free(self) -> bool:
        return self.in_flight < min(self._max_in_flight, self._capacity())

    async def _wait(self, ticket: Ticket, front: bool) -> None:
        if self.closed is not None:
            raise unavailable(self.closed)
        ticket.turn = turn = asyncio.get_running_loop().create_future()
        if front:
            self._queue.appendleft(ticket)
        else:
            self._queue.append(ticket)
        began = time.monotonic()
        self.poke()
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
            ticket.waited += time.monotonic() - began

    def _give_up(self, ticket: Ticket, turn: asyncio.Future[None]) -> None:
        if ticket in self._queue:
            self._queue.remove(ticket)
        elif turn.done() and not turn.cancelled() and turn.exception() is None:
            self.leave()  # the turn came in the same moment
