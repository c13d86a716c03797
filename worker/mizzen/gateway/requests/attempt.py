# SPDX-License-Identifier: Apache-2.0
"""An attempt to serve a request on an engine; if the engine is lost, another engine continues the answer.

The dispatcher creates attempts; sequences read tokens from them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from mizzen.core.request import FinishReason
from mizzen.gateway.engines.engine_client import EngineClient
from mizzen.gateway.requests.engine_request import refusal_error
from mizzen.gateway.requests.routed_request import RoutedRequest
from mizzen.gateway.routing.interfaces import ModelIdentity
from mizzen.gateway.telemetry.request_record import AttemptRecord
from mizzen.wire.client.stream import EngineRefused, EngineStream, StreamLost, TokenLogprobs
from mizzen.wire.messages import Finish

Resume = Callable[["Attempt", StreamLost], Awaitable["Attempt | None"]]
"""Function that continues the answer of an attempt whose engine is lost.

It returns a new attempt on another engine. If the answer cannot continue, it returns None or raises a
StreamLost.
"""


class Attempt:
    """A request that an engine runs. `close` must be called.

    If the engine is lost, `next_tokens` continues the answer on another engine, which generates the tokens
    that follow those already returned. No token is skipped or repeated, and the final counts are those of
    the whole answer.
    """

    def __init__(
        self,
        routed: RoutedRequest,
        engine: EngineClient,
        stream: EngineStream,
        record: AttemptRecord,
        cost: float,
        resume: Resume,
    ) -> None:
        self.routed = routed
        self.engine = engine
        self.stream = stream
        self.record = record
        """Record of the request's time on the engine, for the access log and traces."""
        self.finish: Finish | None = None
        self.prompt_logprobs: list[TokenLogprobs] | None = stream.prompt_logprobs
        """Log probabilities of the prompt's tokens from the second on, if requested.

        They are complete once the first output token has arrived.
        """
        self._identity = engine.model_identity  # captured now, because a lost engine has no model
        self._cost = cost
        self._resume = resume
        self._first: tuple[list[int], Finish | None] | None = None
        self._failure: Exception | None = None
        self._counted = True
        engine.add_request(cost)
        self.breaker_period = engine.breaker.begin_request()

    async def next_tokens(self) -> tuple[list[int], Finish | None]:
        """Return the next tokens, and the engine's `Finish` message if the answer has ended.

        Raises:
            StreamLost: the engine was lost, and the answer cannot continue on another engine.
            ApiError: 400 if an engine cannot run the request because of an error in the request itself.
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
    def model(self) -> ModelIdentity:
        """Identity of the model that serves the request."""
        return self._identity

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens found in a prefix cache; 0 until the engine's `Finish` has arrived.

        After a resume, output tokens found in the new engine's cache do not count.
        """
        return min(self.finish.cached_tokens, len(self.routed.prompt)) if self.finish is not None else 0

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Return the log probabilities of tokens that `next_tokens` has returned.

        The list has one entry for each token returned since the last call of `take_logprobs`; it is empty
        if log probabilities were not requested.
        """
        return self.stream.drain_logprobs()

    async def wait_first_tokens(self, seconds: float) -> None:
        """Wait for the first tokens, so that the next call of `next_tokens` returns them at once.

        Raises:
            EngineRefused: the engine refused the request.
            StreamLost: the engine lost the request, or returned no token within `seconds`.
            ApiError: 400 if the engine cannot run the request because of an error in the request itself.
        """
        self.engine.awaiting_first_token.add(self.stream)
        try:
            async with asyncio.timeout(seconds):
                self._first = await self._next_from_engine()
        except TimeoutError:
            text = f"{self.engine.name} returned no token for {seconds:.0f} s"
            raise StreamLost("no_answer", text) from None
        finally:
            self.engine.awaiting_first_token.discard(self.stream)

    def close(self, error: str = "") -> bool:
        """Abort the request if it is still running, and release it; return whether it was still running.

        `error` says in one word why the engine did not finish the request; it goes into the record.
        """
        unfinished = self.finish is None
        if unfinished:
            self.stream.abort()
        self.release(error)
        return unfinished

    def release(self, error: str = "") -> None:
        """Stop counting the request as running on its engine; `error` goes into the record (see `close`)."""
        self._failure = None
        self.stream.forget()
        if self._counted:
            self._counted = False
            engine_seconds = self.finish.first_token_seconds if self.finish is not None else 0.0
            self.record.end(error, engine_seconds)
            self.engine.remove_request(self._cost)

    async def _next_from_engine(self) -> tuple[list[int], Finish | None]:
        """Return the engine's next tokens, and its `Finish` message if the answer has ended.

        Raises:
            EngineRefused: the engine refused the request.
            StreamLost: the engine lost the request, or finished it with an error.
            ApiError: 400 if the engine finished the request with an error that the request caused.
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
            return tokens, None  # the tokens are valid; the next call raises the error
        self.finish = finish
        return tokens, finish

    async def _resume_elsewhere(self, lost: StreamLost) -> bool:
        """Continue the answer on another engine; return whether one took over."""
        new_attempt = await self._resume(self, lost)
        if new_attempt is not None:
            self._continue_as(new_attempt)
        return new_attempt is not None

    def _continue_as(self, new_attempt: Attempt) -> None:
        """Take over the state of a new attempt for the same request, on another engine."""
        self.engine, self.stream, self.breaker_period = (
            new_attempt.engine,
            new_attempt.stream,
            new_attempt.breaker_period,
        )
        self._cost, self._first, self._counted = new_attempt._cost, new_attempt._first, new_attempt._counted
        self._failure, self.record, self.finish = new_attempt._failure, new_attempt.record, None
