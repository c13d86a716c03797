# SPDX-License-Identifier: Apache-2.0
"""Queues of output that clients have not read yet, bounded per sequence and in total.

Tokens are read from the engine as they arrive, even if the client does not read them. Stop strings are
therefore detected in time, and the engine's slot is freed as soon as the answer ends.
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
"""Approximate number of tokens in a part of the output; each part is sent by one write."""
MAX_UNREAD = 1 << 20
"""Maximum number of entries (tokens and log probabilities) in the unread output of all clients together."""

K = TypeVar("K")


class AbortableConnection(Protocol):
    """Connection that can be aborted; see `mizzen.gateway.http.connection.ConnectionWriter`."""

    def abort(self) -> None:
        """Abort the connection."""
        ...


class StreamClient:
    """Client of one streamed request: its tenant and its connection."""

    def __init__(self, tenant: str, connection: AbortableConnection | None) -> None:
        self.tenant = tenant
        self._connection = connection

    def abort(self) -> None:
        """Abort the client's connection."""
        if self._connection is not None:
            self._connection.abort()


class UnreadOutput:
    """Count of the unread output of all clients, in entries (tokens and log probabilities).

    If the count exceeds the limit, one connection is aborted: the one with the most unread output among the
    connections of the tenant with the most unread output.
    """

    def __init__(self, limit: int = MAX_UNREAD) -> None:
        self._limit = limit
        self._client_entries: Counter[StreamClient] = Counter()
        self._tenant_entries: Counter[str] = Counter()
        self.total = 0

    def adjust(self, client: StreamClient, entries: int) -> None:
        """Add `entries`, which may be negative, to a client's unread output; enforce the limit."""
        add_to_count(self._client_entries, client, entries)
        add_to_count(self._tenant_entries, client.tenant, entries)
        self.total += entries
        if entries > 0 and self.total > self._limit:
            tenant = self._tenant_entries.most_common(1)[0][0]
            clients = (client for client in self._client_entries if client.tenant == tenant)
            max(clients, key=lambda client: self._client_entries[client]).abort()


def add_to_count(counts: Counter[K], key: K, amount: int) -> None:
    """Add `amount` to the count of `key`; delete the count if it becomes 0."""
    counts[key] += amount
    if not counts[key]:
        del counts[key]


class OutputPart(NamedTuple):
    """Part of an answer that is sent by one write."""

    piece: AnswerPiece
    usage: TokenUsage | None
    """Token counts of the answer up to the end of this part; None unless stream events report them."""


class OutputQueue:
    """Queue of one sequence's unread output, with the task that sends it. `close` must be called."""

    def __init__(self, unread_output: UnreadOutput, client: StreamClient) -> None:
        self._unread_output, self._client = unread_output, client
        self._parts: deque[tuple[list[AnswerPiece], TokenUsage | None]] = deque()
        self._last_part_tokens = 0
        """Number of tokens in the last part."""
        self._tokens = 0
        self._send_task: asyncio.Task[None] | None = None

    @property
    def is_sending(self) -> bool:
        """True while the task that `start_sending` has started runs; new pieces must then be queued.

        Raises:
            Exception: the error with which the task has failed.
        """
        if self._send_task is None:
            return False
        if self._send_task.done():
            self._send_task.result()
            return False
        return True

    def start_sending(self, work: Coroutine[Any, Any, None]) -> None:
        """Start `work` in a task; `work` sends all queued output, including pieces pushed while it runs."""
        self._send_task = asyncio.create_task(work)

    async def wait_sent(self) -> None:
        """Wait until the task has sent all output.

        Raises:
            ClientGone: the client has disconnected, or does not read.
        """
        if self._send_task is not None:
            await self._send_task

    async def close(self) -> None:
        """Cancel the task, and drop the output that has not been sent."""
        if self._send_task is not None:
            self._send_task.cancel()
            await asyncio.gather(self._send_task, return_exceptions=True)
            self._send_task = None
        while self._parts:
            self.pop()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def push(self, piece: AnswerPiece, usage: TokenUsage | None) -> None:
        """Append a piece of the answer, with the usage so far if stream events report it.

        Raises:
            StreamLost: the queue would hold more than `MAX_UNREAD_TOKENS` tokens.
        """
        if self._tokens + len(piece.token_ids) > MAX_UNREAD_TOKENS:
            raise StreamLost("slow", f"more than {MAX_UNREAD_TOKENS} tokens are waiting for a slow client")
        if self._parts and self._last_part_tokens < PART_TOKENS:
            pieces = self._parts.pop()[0]
        else:
            self._join_last()
            pieces, self._last_part_tokens = [], 0
        pieces.append(piece)
        self._parts.append((pieces, usage))
        self._last_part_tokens += len(piece.token_ids)
        self._count(piece, 1)

    def pop(self) -> OutputPart:
        """Remove and return the first part."""
        pieces, usage = self._parts.popleft()
        for piece in pieces:
            self._count(piece, -1)
        return OutputPart(pieces[0] if len(pieces) == 1 else join_pieces(pieces), usage)

    def _join_last(self) -> None:
        """Join the pieces of the last part, which is complete: one piece takes less memory than many."""
        if self._parts:
            pieces, usage = self._parts[-1]
            self._parts[-1] = ([join_pieces(pieces)], usage)

    def _count(self, piece: AnswerPiece, sign: int) -> None:
        logprob_entries = sum(1 + len(token.top) for token in piece.logprobs)
        self._tokens += sign * len(piece.token_ids)
        self._unread_output.adjust(self._client, sign * (len(piece.token_ids) + logprob_entries))
