"""An answer as it comes, whichever engines give it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from mizzen.core.request import FinishReason
from mizzen.gateway.engines.engine_client import EngineClient
from mizzen.gateway.requests.engine_request import refusal_error
from mizzen.gateway.requests.routed_request import RoutedRequest
from mizzen.gateway.telemetry.request_record import AttemptRecord
from mizzen.wire.client.stream import EngineRefused, EngineStream, StreamLost, TokenLogprobs
from mizzen.wire.messages import Finish

Resume = Callable[["Attempt", StreamLost], Awaitable["Attempt | None"]]
"""Returns what goes on with an answer whose engine is lost; None, or a StreamLost, when nothing does."""


class Attempt:
    """A request in an engine, from its first tokens on. `close` must be called.

    When its engine is lost, `next` continues the answer in another one from the tokens that it has returned:
    there is no gap, no token twice, and an end counts the whole answer.
    """

    def __init__(
        self, routed: RoutedRequest, engine: EngineClient, stream: EngineStream, cost: float, resume: Resume
    ) -> None:
        self.routed = routed
        self.engine = engine
        self.stream = stream
        self.finish: Finish | None = None
        self.prompt_logprobs: list[TokenLogprobs] | None = stream.prompt_logprobs
        """Of the prompt's tokens from the second on, where asked for; complete with the first token."""
        self._identity = engine.model_identity  # as of now: an engine that is lost serves nothing
        self._cost = cost
        self._resume = resume
        self._first: tuple[list[int], Finish | None] | None = None
        self._failure: Exception | None = None
        self._counted = True
        self.record: AttemptRecord | None = None
        """What the request's record is told of its time in the engine."""
        engine.add_request(cost)
        self.breaker_period = engine.breaker.begin_request()

    async def next_tokens(self) -> tuple[list[int], Finish | None]:
        """Return the next tokens, and the end if it is known.

        Raises:
            StreamLost: the answer cannot go on.
            ApiError: 400, what the request asks for cannot go on anywhere.
        """
        while True:
            try:
                tokens, finish = await self._next_from_engine()
            except StreamLost as error:
                if not await self._resume_elsewhere(error):
                    raise
            except EngineRefused as error:
                if not await self._resume_elsewhere(StreamLost("refused", str(error))):
                    raise StreamLost("refused", str(error)) from error
            else:
                if self.routed.pinned_model is None:
                    self.routed.pinned_model = self._identity
                self.routed.generated.extend(tokens)
                return tokens, finish

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens from a cache, known with the end; who takes over may have output there, too."""
        return min(self.finish.cached_tokens, len(self.routed.prompt)) if self.finish is not None else 0

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Return one entry for each token that `next` returned since the last call; none if not asked for."""
        return self.stream.drain_logprobs()

    async def wait_first_tokens(self, seconds: float) -> None:
        """Wait for the first tokens; `next` returns them.

        Raises:
            EngineRefused: the engine does not take the request.
            StreamLost: it lost the request, or has given no token after `seconds`.
            ApiError: see `next`.
        """
        self.engine.awaiting_first_token.add(self.stream)
        try:
            async with asyncio.timeout(seconds):
                self._first = await self._next_from_engine()
        except TimeoutError:
            raise StreamLost("no_answer", f"{self.engine.name} gave no token for {seconds:.0f} s") from None
        finally:
            self.engine.awaiting_first_token.discard(self.stream)

    def close(self, error: str = "") -> bool:
        """Abort what still runs, and end the count of the request; tell whether there was something.

        `error` is a word for why the engine did not finish it.
        """
        unfinished = self.finish is None
        if unfinished:
            self.stream.abort()
        self.release(error)
        return unfinished

    def release(self, error: str = "") -> None:
        """End the count of the request in its engine; the engine has nothing of it any more."""
        self._failure = None
        self.stream.forget()
        if self._counted:
            self._counted = False
            if self.record is not None:
                told = self.finish.first_token_seconds if self.finish is not None else 0.0
                self.record.end(error, told)
            self.engine.remove_request(self._cost)

    async def _next_from_engine(self) -> tuple[list[int], Finish | None]:
        """Return what the engine gives.

        Raises:
            EngineRefused, StreamLost: see `EngineStream.next`; an end in error is a StreamLost too.
            ApiError: 400 for an end that is the request's own fault.
        """
        if self._first is not None:
            (tokens, finish), self._first = self._first, None
        elif self._failure is not None:
            raise self._failure
        else:
            tokens, finish = await self.stream.next()
        if finish is not None and finish.reason in (FinishReason.ERROR, FinishReason.ABORT):
            text = finish.message or "the engine gave the request up"
            own = finish.at_fault
            self._failure = (
                refusal_error(self.routed.generation, text) if own else StreamLost("engine_error", text)
            )
            if not tokens:
                raise self._failure
            return tokens, None  # they are good, and need not be drawn again
        self.finish = finish
        return tokens, finish

    async def _resume_elsewhere(self, lost: StreamLost) -> bool:
        """Tell whether another engine goes on with the answer."""
        other = await self._resume(self, lost)
        if other is not None:
            self._continue_as(other)
        return other is not None

    def _continue_as(self, other: Attempt) -> None:
        """Go on as the same request in another engine."""
        self.engine, self.stream, self.breaker_period = other.engine, other.stream, other.breaker_period
        self._cost, self._first, self._counted = other._cost, other._first, other._counted
        self._failure, self.record, self.finish = other._failure, other.record, None
