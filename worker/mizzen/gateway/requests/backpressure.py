"""What clients have yet to take of their streams: bounded one by one, and all together.

A stream is read as it comes, whether its client takes it or not: so a stop string is seen in time, and the
turn and the place in the engine are given back with the answer's end.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Coroutine
from typing import Any, NamedTuple, Protocol, TypeVar

from mizzen.gateway.requests.answer import AnswerPiece, join_pieces
from mizzen.gateway.requests.usage import TokenUsage
from mizzen.wire.client.stream import MAX_UNREAD_TOKENS, StreamLost

PART_TOKENS = 256
"""Pieces are joined to parts of about so many tokens, each of which is one write."""
MAX_UNREAD = 1 << 20
"""Tokens, and log probabilities beside them, that wait for all clients together."""

K = TypeVar("K")


class AbortableConnection(Protocol):
    """What can be ended at once; see `mizzen.gateway.http.connection.Output`."""

    def abort(self) -> None:
        """End it."""
        ...


class StreamClient:
    """Whom parts wait for: one request's client."""

    def __init__(self, tenant: str, connection: AbortableConnection | None) -> None:
        self.tenant = tenant
        self._connection = connection

    def abort(self) -> None:
        """End its connection."""
        if self._connection is not None:
            self._connection.abort()


class UnreadOutput:
    """Counts what waits for all clients. Beyond the limit, whoever has most loses its largest answer."""

    def __init__(self, limit: int = MAX_UNREAD) -> None:
        self._limit = limit
        self._client_entries: Counter[StreamClient] = Counter()
        self._tenant_entries: Counter[str] = Counter()
        self.total = 0

    def adjust(self, client: StreamClient, entries: int) -> None:
        """Count what waits for a client from now on, or below 0 what does so no more."""
        add_to_count(self._client_entries, client, entries)
        add_to_count(self._tenant_entries, client.tenant, entries)
        self.total += entries
        if entries > 0 and self.total > self._limit:
            tenant = self._tenant_entries.most_common(1)[0][0]
            mine = (one for one in self._client_entries if one.tenant == tenant)
            max(mine, key=lambda one: self._client_entries[one]).abort()


def add_to_count(counts: Counter[K], key: K, amount: int) -> None:
    """Add to one of some counts, and drop it at 0."""
    counts[key] += amount
    if not counts[key]:
        del counts[key]


class OutputPart(NamedTuple):
    """Some of an answer, as one event tells it."""

    piece: AnswerPiece
    usage: TokenUsage | None
    """Of the answer up to its end, where events hold it."""


class OutputQueue:
    """What waits of one sequence of a request, in its order, and who sends it. `close` must be called."""

    def __init__(self, unread_output: UnreadOutput, client: StreamClient) -> None:
        self._untaken, self._client = unread_output, client
        self._parts: deque[tuple[list[AnswerPiece], TokenUsage | None]] = deque()
        self._last = 0
        """Tokens of the last part."""
        self._tokens = 0
        self._send_task: asyncio.Task[None] | None = None

    @property
    def is_sending(self) -> bool:
        """Whether something is being sent, which new pieces wait for; raises what went wrong with it."""
        if self._send_task is None:
            return False
        if self._send_task.done():
            self._send_task.result()
            return False
        return True

    def start_sending(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something sent, and then all that has been added meanwhile."""
        self._send_task = asyncio.create_task(work)

    async def wait_sent(self) -> None:
        """Wait until all is sent.

        Raises:
            ClientGone: the client does not take it.
        """
        if self._send_task is not None:
            await self._send_task

    async def close(self) -> None:
        """Send nothing more, and forget what waits."""
        if self._send_task is not None:
            self._send_task.cancel()
            await asyncio.gather(self._send_task, return_exceptions=True)
            self._send_task = None
        while self._parts:
            self.pop()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def push(self, piece: AnswerPiece, usage: TokenUsage | None) -> None:
        """Put a piece behind the others.

        Raises:
            StreamLost: they are too many.
        """
        if self._tokens + len(piece.token_ids) > MAX_UNREAD_TOKENS:
            raise StreamLost("slow", f"more than {MAX_UNREAD_TOKENS} tokens wait for a slow client")
        if self._parts and self._last < PART_TOKENS:
            pieces = self._parts.pop()[0]
        else:
            self._join_last()
            pieces, self._last = [], 0
        pieces.append(piece)
        self._parts.append((pieces, usage))
        self._last += len(piece.token_ids)
        self._count(piece, 1)

    def pop(self) -> OutputPart:
        """Return the first part, which waits no more."""
        pieces, usage = self._parts.popleft()
        for piece in pieces:
            self._count(piece, -1)
        return OutputPart(pieces[0] if len(pieces) == 1 else join_pieces(pieces), usage)

    def _join_last(self) -> None:
        """Join the last part's pieces: it gets no more of them, and one takes less memory than many."""
        if self._parts:
            pieces, usage = self._parts[-1]
            self._parts[-1] = ([join_pieces(pieces)], usage)

    def _count(self, piece: AnswerPiece, sign: int) -> None:
        beside = sum(1 + len(token.top) for token in piece.logprobs)
        self._tokens += sign * len(piece.token_ids)
        self._untaken.adjust(self._client, sign * (len(piece.token_ids) + beside))
