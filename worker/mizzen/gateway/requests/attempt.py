"""A request in one engine, whose answer continues on another engine if that one is lost.

The dispatcher makes attempts; sequences read them.
"""

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
"""Returns the attempt that continues the answer of a lost engine; None or a StreamLost if none does."""


class Attempt:
    """Request in an engine. `close` must be called.

    If its engine is lost, `next_tokens` continues the answer on another engine from the tokens that it has
    returned: without a gap, without a token twice, and with a finish that counts the whole answer.
    """

    def __init__(
        self, routed: RoutedRequest, engine: EngineClient, stream: EngineStream, cost: float, resume: Resume
    ) -> None:
        self.routed = routed
        self.engine = engine
        self.stream = stream
        self.finish: Finish | None = None
        self.prompt_logprobs: list[TokenLogprobs] | None = stream.prompt_logprobs
        """Log probabilities of the prompt's tokens from the second on, if requested; complete with the
        first token."""
        self._identity = engine.model_identity  # captured now, because a lost engine serves nothing
        self._cost = cost
        self._resume = resume
        self._first: tuple[list[int], Finish | None] | None = None
        self._failure: Exception | None = None
        self._counted = True
        self.record: AttemptRecord | None = None
        """Record of the request's time in the engine."""
        engine.add_request(cost)
        self.breaker_period = engine.breaker.begin_request()

    async def next_tokens(self) -> tuple[list[int], Finish | None]:
        """Return the next tokens, and the finish if it is known.

        Raises:
            StreamLost: the answer cannot continue.
            ApiError: 400, what the request asks for cannot continue on any engine.
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
        """Prompt tokens from a cache, known at the finish. After a resume, cached output tokens do not
        count."""
        return min(self.finish.cached_tokens, len(self.routed.prompt)) if self.finish is not None else 0

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Return one entry for each token that `next_tokens` returned since the last call; empty if not
        requested."""
        return self.stream.drain_logprobs()

    async def wait_first_tokens(self, seconds: float) -> None:
        """Wait for the first tokens, which `next_tokens` returns.

        Raises:
            EngineRefused: the engine refused the request.
            StreamLost: it lost the request, or returned no token within `seconds`.
            ApiError: see `next_tokens`.
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
        """Abort the request if it still runs, and stop counting it; return whether it still ran.

        `error` is one word for why the engine did not finish it.
        """
        unfinished = self.finish is None
        if unfinished:
            self.stream.abort()
        self.release(error)
        return unfinished

    def release(self, error: str = "") -> None:
        """Stop counting the request in its engine, which no longer has it."""
        self._failure = None
        self.stream.forget()
        if self._counted:
            self._counted = False
            if self.record is not None:
                engine_seconds = self.finish.first_token_seconds if self.finish is not None else 0.0
                self.record.end(error, engine_seconds)
            self.engine.remove_request(self._cost)

    async def _next_from_engine(self) -> tuple[list[int], Finish | None]:
        """Return the engine's next tokens and finish.

        Raises:
            EngineRefused, StreamLost: see `EngineStream.next`; a finish with an error is a StreamLost too.
            ApiError: 400 for a finish that is the request's own fault.
        """
        if self._first is not None:
            (tokens, finish), self._first = self._first, None
        elif self._failure is not None:
            raise self._failure
        else:
            tokens, finish = await self.stream.next()
        if finish is not None and finish.reason in (FinishReason.ERROR, FinishReason.ABORT):
            text = finish.message or "the engine abandoned the request"
            at_fault = finish.at_fault
            self._failure = (
                refusal_error(self.routed.generation, text) if at_fault else StreamLost("engine_error", text)
            )
            if not tokens:
                raise self._failure
            return tokens, None  # they are valid and need not be sampled again
        self.finish = finish
        return tokens, finish

    async def _resume_elsewhere(self, lost: StreamLost) -> bool:
        """Continue the answer on another engine; return whether one took over."""
        new_attempt = await self._resume(self, lost)
        if new_attempt is not None:
            self._continue_as(new_attempt)
        return new_attempt is not None

    def _continue_as(self, new_attempt: Attempt) -> None:
        """Become an attempt on another engine for the same request."""
        self.engine, self.stream, self.breaker_period = (
            new_attempt.engine,
            new_attempt.stream,
            new_attempt.breaker_period,
        )
        self._cost, self._first, self._counted = new_attempt._cost, new_attempt._first, new_attempt._counted
        self._failure, self.record, self.finish = new_attempt._failure, new_attempt.record, None
