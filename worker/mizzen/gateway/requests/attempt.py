"""An answer as it comes, whichever engines give it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from mizzen.core.request import FinishReason
from mizzen.gateway.engines.engine_table import Engine
from mizzen.gateway.requests.engine_request import refused
from mizzen.gateway.requests.routed_request import Job
from mizzen.gateway.telemetry.request_record import Attempt
from mizzen.wire.client.stream import EngineRefused, EngineStream, StreamLost, TokenLogprobs
from mizzen.wire.messages import Finish

Resume = Callable[["Running", StreamLost], Awaitable["Running | None"]]
"""Returns what goes on with an answer whose engine is lost; None, or a StreamLost, when nothing does."""


class Running:
    """A request in an engine, from its first tokens on. `close` must be called.

    When its engine is lost, `next` continues the answer in another one from the tokens that it has returned:
    there is no gap, no token twice, and an end counts the whole answer.
    """

    def __init__(self, job: Job, engine: Engine, stream: EngineStream, cost: float, resume: Resume) -> None:
        self.job = job
        self.engine = engine
        self.stream = stream
        self.finish: Finish | None = None
        self.prompt_logprobs: list[TokenLogprobs] | None = stream.prompt_logprobs
        """Of the prompt's tokens from the second on, where asked for; complete with the first token."""
        self._pin = engine.pin  # as of now: an engine that is lost serves nothing
        self._cost = cost
        self._resume = resume
        self._first: tuple[list[int], Finish | None] | None = None
        self._failure: Exception | None = None
        self._held = True
        self.attempt: Attempt | None = None
        """What the request's record is told of its time in the engine."""
        engine.take(cost)
        self.period = engine.breaker.begin()

    async def next(self) -> tuple[list[int], Finish | None]:
        """Return the next tokens, and the end if it is known.

        Raises:
            StreamLost: the answer cannot go on.
            ApiError: 400, what the request asks for cannot go on anywhere.
        """
        while True:
            try:
                tokens, finish = await self._next()
            except StreamLost as error:
                if not await self._goes_on(error):
                    raise
            except EngineRefused as error:
                if not await self._goes_on(StreamLost("refused", str(error))):
                    raise StreamLost("refused", str(error)) from error
            else:
                if self.job.pin is None:
                    self.job.pin = self._pin
                self.job.given.extend(tokens)
                return tokens, finish

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens from a cache, known with the end; who takes over may have output there, too."""
        return min(self.finish.cached_tokens, len(self.job.prompt)) if self.finish is not None else 0

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Return one entry for each token that `next` returned since the last call; none if not asked for."""
        return self.stream.take_logprobs()

    async def begin(self, seconds: float) -> None:
        """Wait for the first tokens; `next` returns them.

        Raises:
            EngineRefused: the engine does not take the request.
            StreamLost: it lost the request, or has given no token after `seconds`.
            ApiError: see `next`.
        """
        self.engine.waiting.add(self.stream)
        try:
            async with asyncio.timeout(seconds):
                self._first = await self._next()
        except TimeoutError:
            raise StreamLost("no_answer", f"{self.engine.name} gave no token for {seconds:.0f} s") from None
        finally:
            self.engine.waiting.discard(self.stream)

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
        if self._held:
            self._held = False
            if self.attempt is not None:
                told = self.finish.first_token_seconds if self.finish is not None else 0.0
                self.attempt.end(error, told)
            self.engine.release(self._cost)

    async def _next(self) -> tuple[list[int], Finish | None]:
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
            self._failure = refused(self.job.wish, text) if own else StreamLost("engine_error", text)
            if not tokens:
                raise self._failure
            return tokens, None  # they are good, and need not be drawn again
        self.finish = finish
        return tokens, finish

    async def _goes_on(self, lost: StreamLost) -> bool:
        """Tell whether another engine goes on with the answer."""
        other = await self._resume(self, lost)
        if other is not None:
            self._adopt(other)
        return other is not None

    def _adopt(self, other: Running) -> None:
        """Go on as the same request in another engine."""
        self.engine, self.stream, self.period = other.engine, other.stream, other.period
        self._cost, self._first, self._held = other._cost, other._first, other._held
        self._failure, self.attempt, self.finish = other._failure, other.attempt, None
