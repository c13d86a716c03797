"""The gateway's end of one request in one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from mizzen.core.request import Int32
from mizzen.wire.messages import Embedding, Finish, Logprobs

MAX_UNREAD_TOKENS = 65_536
"""A reader that falls behind further is given up."""


class StreamLost(Exception):
    """What a request has become in its engine will not be known. `cause` is one word, for metrics."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class EngineOverloaded(Exception):
    """The engine does not take frames at the moment; nothing was sent."""


class EngineRefused(Exception):
    """The engine did not take the request. `code` is a `mizzen.wire.messages.RefusalCode`."""

    def __init__(self, code: int, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_seconds = retry_after_seconds


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log probabilities (natural logarithms) of one token and of others in its place.

    They are those of the processed logits (biases, penalties and grammar applied) at temperature 1, of a
    prompt those of the model's own. A token that cannot be drawn has -9999.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most probable tokens, the most probable first."""
    asked: tuple[float, ...]
    """Those of `Sampling.logprob_token_ids`, in their order."""


class EngineStream:
    """Tokens of one request as they come. One reader; everything happens on one event loop."""

    __slots__ = (
        "_abort", "_aborted", "_asked", "_ended", "_error", "_finish", "_given", "_logprobs", "_reported",
        "_tokens", "_waiter", "prompt_logprobs", "received", "rid",
    )  # fmt: skip

    def __init__(
        self,
        rid: int,
        abort: Callable[[EngineStream], None],
        *,
        generated: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: bool = False,
    ) -> None:
        """Take the request's handle and what it asks for.

        Args:
            rid: the handle.
            abort: tells the engine.
            generated: tokens of its prompt that are output already.
            logprobs: how many tokens by id are reported beside each token; None: no log probabilities.
            prompt_logprobs: whether those of the prompt are reported.
        """
        self.rid = rid
        self.received = generated
        """Output tokens that there are without a gap: those of the prompt, and those that have arrived."""
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if prompt_logprobs else None
        """Of the prompt's tokens from the second on, where asked for: complete before the first token."""
        self._asked = logprobs
        self._logprobs: list[TokenLogprobs] = []
        self._reported = generated
        """Output tokens whose log probabilities have arrived."""
        self._given = 0
        """Tokens that `next` returned since the last `take_logprobs`."""
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
        self._given += len(tokens)
        return tokens, self._finish

    def drain_logprobs(self) -> list[TokenLogprobs]:
        """Return one entry for each token that `next` returned since the last call; none if not asked for."""
        taken, self._logprobs = self._logprobs[: self._given], self._logprobs[self._given :]
        self._given = 0
        return taken

    def abort(self) -> None:
        """Stop the request in the engine; tokens that still come are dropped. The end may be awaited."""
        if not self._ended and not self._aborted:
            self._aborted = True
            self._tokens.clear()
            self._abort(self)

    async def wait_finish(self, seconds: float) -> Finish | None:
        """Return how an aborted request ended; None when that does not come to be known in time."""
        try:
            async with asyncio.timeout(seconds):
                while self._finish is None:
                    await self.next()
        except (TimeoutError, StreamLost, EngineRefused):
            return None
        return self._finish

    def add_logprobs(self, message: Logprobs) -> None:
        """Take log probabilities from the link, ahead of their tokens.

        Raises:
            ValueError: its columns have no such width.
        """
        if self._ended or self._aborted:
            return
        if message.prompt:
            if self.prompt_logprobs is not None:
                self.prompt_logprobs += unpack_logprobs(message, 0)
        elif self._asked is not None:
            entries = unpack_logprobs(message, self._asked)
            self._reported += len(entries)
            self._logprobs += entries

    def add_tokens(self, offset: int, tokens: list[int]) -> None:
        """Take tokens from the link; a gap fails the stream."""
        if self._ended or self._aborted:
            return
        if offset != self.received:
            self.abort()
            self.fail(StreamLost("gap", f"token {self.received} was expected from the engine, {offset} came"))
            return
        self.received += len(tokens)
        if self._asked is not None and self._reported != self.received:
            self.abort()
            self.fail(StreamLost("gap", f"{self.received} tokens came, {self._reported} log probabilities"))
            return
        self._tokens += tokens
        if len(self._tokens) > MAX_UNREAD_TOKENS:
            self.abort()
            self.fail(StreamLost("slow", f"more than {MAX_UNREAD_TOKENS} tokens wait for a slow client"))
            return
        self._wake()

    def finish(self, finish: Finish) -> None:
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

    def forget(self) -> None:
        """Drop what it ended with: an error that was raised refers to all who heard of it."""
        if self._error is not None:
            self._error = StreamLost("closed", "the request was given up")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EmbedReply:
    """The gateway's end of one request for an embedding."""

    __slots__ = ("answer", "rid")

    def __init__(self, rid: int) -> None:
        self.rid = rid
        self.answer: asyncio.Future[Embedding] = asyncio.get_running_loop().create_future()

    def set_embedding(self, embedding: Embedding) -> None:
        """Take the answer from the link."""
        if not self.answer.done():
            self.answer.set_result(embedding)

    def add_logprobs(self, message: Logprobs) -> None:
        """Pass over what is not meant for embeddings."""

    def add_tokens(self, offset: int, tokens: list[int]) -> None:
        """Pass over what is not meant for embeddings."""

    def finish(self, finish: Finish) -> None:
        """Take an end without an embedding from the link: aborted, or failed."""
        self.fail(StreamLost("end", finish.message or "the engine ended the request without an embedding"))

    def fail(self, error: Exception) -> None:
        """End with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)


def unpack_logprobs(message: Logprobs, asked: int) -> list[TokenLogprobs]:
    """Return a message's entries; the last `asked` of each are those asked for by id.

    Raises:
        ValueError: the columns do not have that width.
    """
    width = message.width
    ids, values = np.frombuffer(message.ids, "<i4"), np.frombuffer(message.values, "<f4")
    if width < 1 + asked or len(ids) % width or len(ids) != len(values):
        raise ValueError(f"{len(ids)} ids and {len(values)} values are no rows of {width}")
    return logprob_entries(ids.reshape(-1, width), values.reshape(-1, width), asked)


def logprob_entries(ids: Int32, values: NDArray[np.float32], asked: int) -> list[TokenLogprobs]:
    """Return the entries of a table of ids and log probabilities, each [tokens, width > asked]."""
    top = ids.shape[1] - asked
    return [
        TokenLogprobs(
            token=tokens[0],
            logprob=logprobs[0],
            top=tuple(zip(tokens[1:top], logprobs[1:top], strict=True)),
            asked=tuple(logprobs[top:]),
        )
        for tokens, logprobs in zip(ids.tolist(), values.tolist(), strict=True)
    ]
