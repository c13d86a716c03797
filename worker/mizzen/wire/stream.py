"""The gateway's end of one request in one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mizzen.wire.messages import Finish

MAX_UNREAD_TOKENS = 65_536
"""A reader that falls behind further is given up."""


class StreamLost(Exception):
    """What a request has become in its engine will not be known. `cause` is one word, for metrics."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class EngineRefused(Exception):
    """The engine did not take the request. `code` is a `mizzen.wire.messages.RefusalCode`."""

    def __init__(self, code: int, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_seconds = retry_after_seconds


class EngineStream:
    """Tokens of one request as they come. One reader; everything happens on one event loop."""

    __slots__ = ("_abort", "_aborted", "_ended", "_error", "_finish", "_tokens", "_waiter", "received", "rid")

    def __init__(self, rid: int, abort: Callable[[EngineStream], None]) -> None:
        self.rid = rid
        self.received = 0
        """Tokens that have arrived, without a gap."""
        self._abort = abort
        self._aborted = False
        self._ended = False
        self._tokens: list[int] = []
        self._finish: Finish | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> tuple[list[int], Finish | None]:
        """Return the tokens that arrived since the last call (waiting for some), and the end if it is known.

        Raises:
            EngineRefused: the engine does not take the request.
            StreamLost: the connection was lost, the engine restarted, or a frame is missing.
        """
        while not self._tokens and self._finish is None:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        tokens, self._tokens = self._tokens, []
        return tokens, self._finish

    def abort(self) -> None:
        """Stop the request in the engine; tokens that still come are dropped. The end may be awaited."""
        if not self._ended and not self._aborted:
            self._aborted = True
            self._tokens.clear()
            self._abort(self)

    async def final(self, seconds: float) -> Finish | None:
        """Return how an aborted request ended; None when that does not come to be known in time."""
        try:
            async with asyncio.timeout(seconds):
                while self._finish is None:
                    await self.next()
        except (TimeoutError, StreamLost, EngineRefused):
            return None
        return self._finish

    def feed(self, offset: int, tokens: list[int]) -> None:
        """Take tokens from the link; a gap fails the stream."""
        if self._ended or self._aborted:
            return
        if offset != self.received:
            self.abort()
            self.fail(StreamLost("gap", f"token {self.received} was expected from the engine, {offset} came"))
            return
        self.received += len(tokens)
        self._tokens += tokens
        if len(self._tokens) > MAX_UNREAD_TOKENS:
            self.abort()
            self.fail(StreamLost("slow", f"more than {MAX_UNREAD_TOKENS} tokens wait for a slow client"))
            return
        self._wake()

    def end(self, finish: Finish) -> None:
        """Take the end from the link; one that counts other tokens than came fails the stream."""
        if self._ended:
            return
        if not self._aborted and finish.output_tokens != self.received and not finish.message:
            self.fail(
                StreamLost("gap", f"the engine counts {finish.output_tokens} tokens, {self.received} came")
            )
            return
        self._ended = True
        self._finish = finish
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._tokens.clear()
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
