"""What clients have yet to take of their streams: bounded one by one, and all together.

A stream is read as it comes, whether its client takes it or not: so a stop string is seen in time, and the
turn and the place in the engine are given back with the answer's end.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Coroutine
from typing import Any, NamedTuple, Protocol, TypeVar

from mizzen.gateway.openai.response_bodies import Usage
from mizzen.gateway.requests.answer import Piece, whole
from mizzen.wire.client.stream import MAX_UNREAD_TOKENS, StreamLost

PART_TOKENS = 256
"""Pieces are joined to parts of about so many tokens, each of which is one write."""
MAX_UNTAKEN = 1 << 20
"""Tokens, and log probabilities beside them, that wait for all clients together."""

K = TypeVar("K")


class Connection(Protocol):
    """What can be ended at once; see `mizzen.gateway.http.connection.Output`."""

    def cut(self) -> None:
        """End it."""
        ...


class Client:
    """Whom parts wait for: one request's client."""

    def __init__(self, tenant: str, connection: Connection | None) -> None:
        self.tenant = tenant
        self._connection = connection

    def cut(self) -> None:
        """End its connection."""
        if self._connection is not None:
            self._connection.cut()


class Untaken:
    """Counts what waits for all clients. Beyond the limit, whoever has most loses its largest answer."""

    def __init__(self, limit: int = MAX_UNTAKEN) -> None:
        self._limit = limit
        self._held: Counter[Client] = Counter()
        self._tenants: Counter[str] = Counter()
        self.total = 0

    def change(self, client: Client, entries: int) -> None:
        """Count what waits for a client from now on, or below 0 what does so no more."""
        change(self._held, client, entries)
        change(self._tenants, client.tenant, entries)
        self.total += entries
        if entries > 0 and self.total > self._limit:
            tenant = self._tenants.most_common(1)[0][0]
            mine = (one for one in self._held if one.tenant == tenant)
            max(mine, key=lambda one: self._held[one]).cut()


def change(counts: Counter[K], key: K, amount: int) -> None:
    """Add to one of some counts, and drop it at 0."""
    counts[key] += amount
    if not counts[key]:
        del counts[key]


class Part(NamedTuple):
    """Some of an answer, as one event tells it."""

    piece: Piece
    usage: Usage | None
    """Of the answer up to its end, where events hold it."""


class Parts:
    """What waits of one sequence of a request, in its order, and who sends it. `close` must be called."""

    def __init__(self, untaken: Untaken, client: Client) -> None:
        self._untaken, self._client = untaken, client
        self._parts: deque[tuple[list[Piece], Usage | None]] = deque()
        self._last = 0
        """Tokens of the last part."""
        self._tokens = 0
        self._sending: asyncio.Task[None] | None = None

    @property
    def behind(self) -> bool:
        """Whether something is being sent, which new pieces wait for; raises what went wrong with it."""
        if self._sending is None:
            return False
        if self._sending.done():
            self._sending.result()
            return False
        return True

    def send(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something sent, and then all that has been added meanwhile."""
        self._sending = asyncio.create_task(work)

    async def sent(self) -> None:
        """Wait until all is sent.

        Raises:
            ClientGone: the client does not take it.
        """
        if self._sending is not None:
            await self._sending

    async def close(self) -> None:
        """Send nothing more, and forget what waits."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
            self._sending = None
        while self._parts:
            self.take()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, piece: Piece, usage: Usage | None) -> None:
        """Put a piece behind the others.

        Raises:
            StreamLost: they are too many.
        """
        if self._tokens + len(piece.ids) > MAX_UNREAD_TOKENS:
            raise StreamLost("slow", f"more than {MAX_UNREAD_TOKENS} tokens wait for a slow client")
        if self._parts and self._last < PART_TOKENS:
            pieces = self._parts.pop()[0]
        else:
            self._shrink()
            pieces, self._last = [], 0
        pieces.append(piece)
        self._parts.append((pieces, usage))
        self._last += len(piece.ids)
        self._count(piece, 1)

    def take(self) -> Part:
        """Return the first part, which waits no more."""
        pieces, usage = self._parts.popleft()
        for piece in pieces:
            self._count(piece, -1)
        return Part(pieces[0] if len(pieces) == 1 else whole(pieces), usage)

    def _shrink(self) -> None:
        """Join the last part's pieces: it gets no more of them, and one takes less memory than many."""
        if self._parts:
            pieces, usage = self._parts[-1]
            self._parts[-1] = ([whole(pieces)], usage)

    def _count(self, piece: Piece, sign: int) -> None:
        beside = sum(1 + len(token.top) for token in piece.scored)
        self._tokens += sign * len(piece.ids)
        self._untaken.change(self._client, sign * (len(piece.ids) + beside))
