# SPDX-License-Identifier: Apache-2.0
"""The gateway's end of one request that an engine processes: a stream of tokens, or an embedding."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from mizzen.core.request import Int32
from mizzen.wire.messages import Embedding, Finish, Logprobs

MAX_UNREAD_TOKENS = 65_536
"""Maximum number of unread tokens of a stream; if its reader falls further behind, the stream fails."""


class StreamLost(Exception):
    """The connection to an engine was lost, so the outcome of its requests is unknown.

    `cause` is one word, the value of a metric label.
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class EngineOverloaded(Exception):
    """The send queue of the engine's connection is full; the message was not sent."""


class EngineRefused(Exception):
    """The engine rejected the request. `code` is a `mizzen.wire.messages.RefusalCode`."""

    def __init__(self, code: int, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_seconds = retry_after_seconds


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log probabilities (natural logarithms) of one token and of alternatives at its position.

    For output tokens they are computed from the processed logits (biases, penalties and grammar applied) at
    temperature 1; for prompt tokens, from the model's logits. For a token that cannot be sampled, the value
    is -9999.
    """

    token: int
    """Id of the token."""
    logprob: float
    """Log probability of the token."""
    top: tuple[tuple[int, float], ...]
    """The most probable tokens and their log probabilities, in descending order of probability."""
    requested: tuple[float, ...]
    """Log probabilities of the tokens in `SamplingParams.logprob_token_ids`, in the same order."""


class EngineStream:
    """The stream of a request's output tokens. For one reader, on one event loop."""

    __slots__ = (
        "_abort", "_aborted", "_ended", "_error", "_finish", "_logprobs", "_reported",
        "_requested_ids", "_returned", "_tokens", "_waiter", "images", "prompt_logprobs", "received", "rid",
    )  # fmt: skip

    def __init__(
        self,
        rid: int,
        abort: Callable[[EngineStream], None],
        *,
        generated: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: bool = False,
        images: Mapping[bytes, bytes] | None = None,
    ) -> None:
        """Create the stream of a request.

        Args:
            rid: handle of the request.
            abort: function that sends the engine an abort of the stream's request.
            generated: number of trailing prompt tokens that are output of another engine.
            logprobs: number of token ids whose log probabilities were requested at each output position; None
                if no log probabilities of the output were requested.
            prompt_logprobs: whether log probabilities of the prompt were requested.
            images: contents of the prompt's images, by digest, which the engine may request.
        """
        self.rid = rid
        self.images: Mapping[bytes, bytes] = images or {}
        """Contents of the prompt's images, by digest; empty once the request is aborted or has ended."""
        self.received = generated
        """Number of output tokens received without a gap, plus the `generated` tokens of the prompt."""
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if prompt_logprobs else None
        """Log probabilities of the prompt's tokens from the second on; complete once the first output token
        has arrived. None if not requested."""
        self._requested_ids = logprobs
        self._logprobs: list[TokenLogprobs] = []
        self._reported = generated
        """Number of output tokens whose log probabilities were received, plus `generated`."""
        self._returned = 0
        """Number of tokens that `next` returned since the last `drain_logprobs`."""
        self._abort = abort
        self._aborted = False
        self._ended = False
        self._tokens: list[int] = []
        self._finish: Finish | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def open(self) -> bool:
        """Whether output of the request is still expected: it was not aborted and has not ended."""
        return not self._ended and not self._aborted

    async def next(self) -> tuple[list[int], Finish | None]:
        """Wait for output; return the tokens received since the last call, and the `Finish` if it arrived.

        Raises:
            EngineRefused: the engine rejected the request.
            StreamLost: the connection was lost, the engine restarted, tokens are missing, or the reader was
                too slow.
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
        self._returned += len(tokens)
        return tokens, self._finish

    def drain_logprobs(self) -> list[TokenLogprobs]:
        """Return one entry for each token that `next` has returned since the last call of this method.

        The list is empty if log probabilities were not requested.
        """
        entries, self._logprobs = self._logprobs[: self._returned], self._logprobs[self._returned :]
        self._returned = 0
        return entries

    def abort(self) -> None:
        """Abort the request in the engine; drop unread tokens and all that arrive later.

        `wait_finish` waits until the engine has ended the request.
        """
        if self.open:
            self._aborted = True
            self.images = {}
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
        """Add received log probabilities; they arrive before their tokens.

        Raises:
            ValueError: the columns of the message do not form rows of the announced width.
        """
        if not self.open:
            return
        if message.prompt:
            if self.prompt_logprobs is not None:
                self.prompt_logprobs += unpack_logprobs(message, 0)
        elif self._requested_ids is not None:
            entries = unpack_logprobs(message, self._requested_ids)
            self._reported += len(entries)
            self._logprobs += entries

    def add_tokens(self, offset: int, tokens: list[int]) -> None:
        """Add received tokens; fail the stream at a gap or at more than `MAX_UNREAD_TOKENS` unread tokens.

        Args:
            offset: index of the first token within the request's output.
            tokens: token ids.
        """
        if not self.open:
            return
        if offset != self.received:
            self.abort()
            self.fail(StreamLost("gap", f"expected token {self.received} from the engine, received {offset}"))
            return
        self.received += len(tokens)
        if self._requested_ids is not None and self._reported != self.received:
            self.abort()
            self.fail(
                StreamLost("gap", f"received {self.received} tokens and {self._reported} log probabilities")
            )
            return
        self._tokens += tokens
        if len(self._tokens) > MAX_UNREAD_TOKENS:
            self.abort()
            self.fail(
                StreamLost("slow", f"more than {MAX_UNREAD_TOKENS} tokens are waiting for a slow client")
            )
            return
        self._wake()

    def finish(self, finish: Finish) -> None:
        """Finish the stream, or fail it if fewer or more tokens were received than the engine sent."""
        if self._ended:
            return
        if not self._aborted and finish.output_tokens != self.received and not finish.message:
            self.fail(
                StreamLost(
                    "gap", f"the engine sent {finish.output_tokens} tokens, but {self.received} arrived"
                )
            )
            return
        self._ended = True
        self.images = {}
        self._finish = finish
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error."""
        if not self._ended:
            self._ended = True
            self.images = {}
            self._error = error
            self._tokens.clear()
            self._wake()

    def forget(self) -> None:
        """Replace the stream's error with a new exception, because a raised one keeps stack frames alive."""
        if self._error is not None:
            self._error = StreamLost("closed", "the request was given up")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EmbedReply:
    """The gateway's end of one embedding request; `answer` is a future of the embedding."""

    __slots__ = ("answer", "rid")

    def __init__(self, rid: int) -> None:
        self.rid = rid
        self.answer: asyncio.Future[Embedding] = asyncio.get_running_loop().create_future()

    def set_embedding(self, embedding: Embedding) -> None:
        """Complete `answer` with the received embedding."""
        if not self.answer.done():
            self.answer.set_result(embedding)

    def add_logprobs(self, message: Logprobs) -> None:
        """Do nothing: an embedding request has no output tokens."""

    def add_tokens(self, offset: int, tokens: list[int]) -> None:
        """Do nothing: an embedding request has no output tokens."""

    def finish(self, finish: Finish) -> None:
        """Fail the request, because the engine has ended it without sending an embedding."""
        self.fail(StreamLost("end", finish.message or "the engine ended the request without an embedding"))

    def fail(self, error: Exception) -> None:
        """Fail the request with an error, unless it has ended."""
        if not self.answer.done():
            self.answer.set_exception(error)


def unpack_logprobs(message: Logprobs, requested: int) -> list[TokenLogprobs]:
    """Return one entry per token of a message.

    Args:
        message: log probabilities of a request's tokens.
        requested: number of token ids whose log probabilities were requested; their entries are the last ones
            of each row.

    Raises:
        ValueError: the columns of the message do not form rows of the announced width.
    """
    width = message.width
    ids, values = np.frombuffer(message.ids, "<i4"), np.frombuffer(message.values, "<f4")
    if width < 1 + requested or len(ids) % width or len(ids) != len(values):
        raise ValueError(f"{len(ids)} ids and {len(values)} values do not form rows of {width}")
    return logprob_entries(ids.reshape(-1, width), values.reshape(-1, width), requested)


def logprob_entries(ids: Int32, values: NDArray[np.float32], requested: int) -> list[TokenLogprobs]:
    """Return one entry per row of token ids and log probabilities, both [tokens, width].

    The last `requested` columns hold the tokens that were requested by id; `width` exceeds `requested`.
    """
    top = ids.shape[1] - requested
    return [
        TokenLogprobs(
            token=tokens[0],
            logprob=logprobs[0],
            top=tuple(zip(tokens[1:top], logprobs[1:top], strict=True)),
            requested=tuple(logprobs[top:]),
        )
        for tokens, logprobs in zip(ids.tolist(), values.tolist(), strict=True)
    ]
