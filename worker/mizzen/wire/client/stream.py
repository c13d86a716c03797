"""The gateway's end of one request in one engine: a stream of tokens, or an embedding."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from mizzen.core.request import Int32
from mizzen.wire.messages import Embedding, Finish, Logprobs

MAX_UNREAD_TOKENS = 65_536
"""Maximum number of unread tokens; a reader that falls behind further is dropped."""


class StreamLost(Exception):
    """The connection to a request's engine was lost, so its outcome is unknown. `cause` is a word for
    metrics."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class EngineOverloaded(Exception):
    """The engine does not accept frames at the moment; nothing was sent."""


class EngineRefused(Exception):
    """The engine rejected the request. `code` is a `mizzen.wire.messages.RefusalCode`."""

    def __init__(self, code: int, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_seconds = retry_after_seconds


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log probabilities (natural logarithms) of one token and of alternatives at its position.

    Output tokens: of the processed logits (biases, penalties and grammar applied) at temperature 1. Prompt
    tokens: of the model's logits. A token that cannot be sampled has -9999.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most probable tokens with their log probabilities, in descending order."""
    asked: tuple[float, ...]
    """Log probabilities of `Sampling.logprob_token_ids`, in the same order."""


class EngineStream:
    """The stream of tokens of one request. One reader; used on one event loop."""

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
        """Create the stream of a request.

        Args:
            rid: handle of the request.
            abort: sends an abort to the engine.
            generated: number of prompt tokens that are output already.
            logprobs: number of tokens requested by id per position; None without log probabilities.
            prompt_logprobs: whether log probabilities of the prompt are requested.
        """
        self.rid = rid
        self.received = generated
        """Number of contiguous output tokens: those of the prompt, and those received."""
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if prompt_logprobs else None
        """Log probabilities of the prompt from its second token on, if requested: complete before the first
        token."""
        self._asked = logprobs
        self._logprobs: list[TokenLogprobs] = []
        self._reported = generated
        """Number of output tokens whose log probabilities were received."""
        self._given = 0
        """Number of tokens that `next` returned since the last `drain_logprobs`."""
        self._abort = abort
        self._aborted = False
        self._ended = False
        self._tokens: list[int] = []
        self._finish: Finish | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> tuple[list[int], Finish | None]:
        """Wait for tokens; return those received since the last call, and the `Finish` if the request is
        finished.

        Raises:
            EngineRefused: the engine rejects the request.
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
        """Return one entry for each token that `next` returned since the last call; empty if not
        requested."""
        taken, self._logprobs = self._logprobs[: self._given], self._logprobs[self._given :]
        self._given = 0
        return taken

    def abort(self) -> None:
        """Abort the request in the engine and drop further tokens; `wait_finish` waits for the end."""
        if not self._ended and not self._aborted:
            self._aborted = True
            self._tokens.clear()
            self._abort(self)

    async def wait_finish(self, seconds: float) -> Finish | None:
        """Return the `Finish` of an aborted request, or None if it does not arrive within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while self._finish is None:
                    await self.next()
        except (TimeoutError, StreamLost, EngineRefused):
            return None
        return self._finish

    def add_logprobs(self, message: Logprobs) -> None:
        """Add received log probabilities, which precede their tokens.

        Raises:
            ValueError: the columns do not have the announced width.
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
        """Add received tokens; a gap fails the stream."""
        if self._ended or self._aborted:
            return
        if offset != self.received:
            self.abort()
            self.fail(StreamLost("gap", f"expected token {self.received} from the engine, received {offset}"))
            return
        self.received += len(tokens)
        if self._asked is not None and self._reported != self.received:
            self.abort()
            self.fail(
                StreamLost("gap", f"received {self.received} tokens and {self._reported} log probabilities")
            )
            return
        self._tokens += tokens
        if len(self._tokens) > MAX_UNREAD_TOKENS:
            self.abort()
            self.fail(StreamLost("slow", f"more than {MAX_UNREAD_TOKENS} tokens wait for a slow client"))
            return
        self._wake()

    def finish(self, finish: Finish) -> None:
        """Finish the stream; a number of tokens that differs from those received fails it."""
        if self._ended:
            return
        if not self._aborted and finish.output_tokens != self.received and not finish.message:
            self.fail(
                StreamLost("gap", f"the engine sent {finish.output_tokens} tokens, received {self.received}")
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
        """Drop the error of the stream: a raised error keeps references to the frames that it passed."""
        if self._error is not None:
            self._error = StreamLost("closed", "the request was given up")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EmbedReply:
    """The gateway's end of one embedding request."""

    __slots__ = ("answer", "rid")

    def __init__(self, rid: int) -> None:
        self.rid = rid
        self.answer: asyncio.Future[Embedding] = asyncio.get_running_loop().create_future()

    def set_embedding(self, embedding: Embedding) -> None:
        """Set the received embedding."""
        if not self.answer.done():
            self.answer.set_result(embedding)

    def add_logprobs(self, message: Logprobs) -> None:
        """Ignore a message that does not apply to embeddings."""

    def add_tokens(self, offset: int, tokens: list[int]) -> None:
        """Ignore a message that does not apply to embeddings."""

    def finish(self, finish: Finish) -> None:
        """Fail a request that finished without an embedding: aborted, or failed in the engine."""
        self.fail(StreamLost("end", finish.message or "the engine ended the request without an embedding"))

    def fail(self, error: Exception) -> None:
        """Fail the request with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)


def unpack_logprobs(message: Logprobs, asked: int) -> list[TokenLogprobs]:
    """Return the entries of a message; the last `asked` of each are those requested by id.

    Raises:
        ValueError: the columns do not have the announced width.
    """
    width = message.width
    ids, values = np.frombuffer(message.ids, "<i4"), np.frombuffer(message.values, "<f4")
    if width < 1 + asked or len(ids) % width or len(ids) != len(values):
        raise ValueError(f"{len(ids)} ids and {len(values)} values do not form rows of {width}")
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
