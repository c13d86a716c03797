"""From a request to the engine that runs it: admission, tokenizing, routing, and retries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mizzen.core.blocks import BLOCK_TOKENS, block_hashes
from mizzen.core.request import FinishReason, Int32
from mizzen.gateway.admit import Admission, Ticket
from mizzen.gateway.engines import Engine, EngineTable
from mizzen.gateway.errors import ApiError, invalid, unavailable
from mizzen.gateway.metrics import Metrics
from mizzen.gateway.openai.prompt import prompt_ids, wire_sampling
from mizzen.gateway.openai.wish import Wish
from mizzen.gateway.route.plugins import RouteRequest
from mizzen.gateway.route.router import Router
from mizzen.gateway.route.scorers import EXPECTED_OUTPUT_TOKENS
from mizzen.gateway.text.model import TextModel
from mizzen.wire.client import EngineOverloaded
from mizzen.wire.messages import Finish, RefusalCode, Sampling
from mizzen.wire.stream import EngineRefused, EngineStream, StreamLost

MIN_ENGINE_SECONDS = 30.0
"""A request that was placed may wait this long in its engine, even when its own deadline is nearer."""
ANSWER_MARGIN_SECONDS = 15.0
"""An engine refuses by itself what waits there too long; it gets this much longer to say so."""
PAUSE_SECONDS = 0.1
"""Before a request that every engine has refused is tried again."""
REFUSAL_SECONDS = 0.5
"""How long an engine that takes nothing now is left alone, unless it says so itself."""


@dataclass(slots=True, kw_only=True)
class Job:
    """A request on its way to an engine, over all attempts."""

    wish: Wish
    ticket: Ticket
    text: TextModel | None = None
    prompt: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    sampling: Sampling = field(default_factory=Sampling)
    """With `prompt` and `text`: what the engine is sent."""
    blocks: Sequence[int] = ()
    tried: list[Engine] = field(default_factory=list)
    losses: int = 0
    admitted: bool = False


class Running:
    """A request in an engine, from its first tokens on. `close` must be called."""

    def __init__(self, job: Job, engine: Engine, stream: EngineStream, cost: float) -> None:
        self.job = job
        self.engine = engine
        self.stream = stream
        self.finish: Finish | None = None
        self._cost = cost
        self._first: tuple[list[int], Finish | None] | None = None
        engine.take(cost)

    async def next(self) -> tuple[list[int], Finish | None]:
        """Return the next tokens, and the end if it is known.

        Raises:
            EngineRefused, StreamLost: see `EngineStream.next`; an end in error is a StreamLost too.
        """
        if self._first is not None:
            (tokens, finish), self._first = self._first, None
        else:
            tokens, finish = await self.stream.next()
        self.finish = finish
        if finish is not None and finish.reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise StreamLost("engine_error", finish.message or "the engine gave the request up")
        return tokens, finish

    async def begin(self, seconds: float) -> None:
        """Wait for the first tokens; `next` returns them.

        Raises:
            EngineRefused, StreamLost: as `next`; StreamLost also when none have come after `seconds`.
        """
        try:
            async with asyncio.timeout(seconds):
                self._first = await self.next()
        except TimeoutError:
            raise StreamLost("no_answer", f"{self.engine.name} gave no token for {seconds:.0f} s") from None

    def close(self) -> bool:
        """Abort what still runs, and end the count of the request; tell whether there was something."""
        unfinished = self.finish is None
        if unfinished:
            self.stream.abort()
        self.engine.release(self._cost)
        return unfinished


class Dispatcher:
    """Places requests in engines."""

    def __init__(
        self, table: EngineTable, admission: Admission, router: Router, metrics: Metrics, max_attempts: int
    ) -> None:
        self._table = table
        self._admission = admission
        self._router = router
        self._metrics = metrics
        self._max_attempts = max_attempts

    async def place(self, job: Job) -> Running:
        """Return the request with its first tokens.

        Raises:
            ApiError: it cannot be served, or not in time.
        """
        if not job.admitted:
            await self._admission.enter(job.ticket)
            job.admitted = True
        while True:
            engine = await self._route(job)
            if engine is None or len(job.tried) >= self._max_attempts:
                job.tried.clear()
                await self._queue_again(job)
                continue
            running = await self._try(job, engine)
            if running is not None:
                return running

    def leave(self, job: Job) -> None:
        """End a request's time in work."""
        if job.admitted:
            job.admitted = False
            self._admission.leave()

    def lost(self, job: Job, engine: Engine, error: StreamLost) -> None:
        """Note that an engine lost the request before anything was sent.

        Raises:
            ApiError: it has been lost too often to be tried again.
        """
        job.losses += 1
        job.tried.append(engine)
        self._metrics.retries.labels(error.cause).inc()
        if job.losses >= self._max_attempts:
            text = f"the request was lost by {job.losses} engines, the last time because: {error}"
            raise unavailable(text, code="engine_lost")

    async def _queue_again(self, job: Job) -> None:
        job.admitted = False  # `again` gives the turn back, also when it fails
        await self._admission.again(job.ticket, PAUSE_SECONDS)
        job.admitted = True

    async def _route(self, job: Job) -> Engine | None:
        text = self._table.choose_text(job.text, job.tried)
        if text is None:
            return None
        if text is not job.text:
            await self._tokenize(job, text)
        wanted = job.wish.sampling.max_tokens if job.wish.max_tokens_given else None
        needed = len(job.prompt) + (wanted or 1)
        context = self._table.longest_context(text)
        if needed > context > 0:
            raise too_long(job.wish, len(job.prompt), wanted, context)
        if not job.blocks and len(self._table) > 1:
            job.blocks = tuple(block_hashes(job.prompt))
        request = RouteRequest(
            tokenizer_hash=text.name,
            prompt_tokens=len(job.prompt),
            needed_tokens=needed,
            blocks=job.blocks,
            excluded=job.tried,
        )
        route = self._router.route(request, self._table)
        if route is None:
            return None
        self._metrics.routes.labels(route.reason).inc()
        return route.engine

    async def _try(self, job: Job, engine: Engine) -> Running | None:
        """Return the request with its first tokens; None when this engine does not give any."""
        matched = engine.sketch.match(job.blocks)
        answer = min(job.wish.sampling.max_tokens or EXPECTED_OUTPUT_TOKENS, EXPECTED_OUTPUT_TOKENS)
        seconds = max(MIN_ENGINE_SECONDS, job.ticket.deadline - time.monotonic())
        try:
            stream = engine.link.generate(
                job.prompt.astype("<i4", copy=False).tobytes(), job.sampling, queue_seconds=seconds
            )
        except EngineOverloaded:
            engine.leave_alone(REFUSAL_SECONDS)
            job.tried.append(engine)
            self._metrics.retries.labels("overloaded").inc()
            return None
        except StreamLost as error:
            job.tried.append(engine)
            self._metrics.retries.labels(error.cause).inc()
            return None
        engine.sketch.add(job.blocks)
        running = Running(job, engine, stream, len(job.prompt) - matched * BLOCK_TOKENS + answer)
        try:
            await running.begin(seconds + ANSWER_MARGIN_SECONDS)
        except EngineRefused as refusal:
            running.close()
            self._refused(job, engine, refusal)
            return None
        except StreamLost as error:
            running.close()
            self.lost(job, engine, error)
            return None
        except BaseException:
            running.close()
            raise
        return running

    def _refused(self, job: Job, engine: Engine, refusal: EngineRefused) -> None:
        """Note that an engine did not take the request.

        Raises:
            ApiError: no other would.
        """
        if refusal.code == RefusalCode.INVALID:
            raise invalid(str(refusal), str(refusal).partition(" ")[0], "invalid_request")
        if refusal.code == RefusalCode.QUEUE_TIMEOUT:
            raise unavailable(str(refusal), code="queue_timeout")
        job.tried.append(engine)
        engine.leave_alone(refusal.retry_after_seconds or REFUSAL_SECONDS)
        known = {int(code): code.name.lower() for code in RefusalCode}
        self._metrics.retries.labels(known.get(refusal.code, "refused")).inc()

    async def _tokenize(self, job: Job, text: TextModel) -> None:
        job.prompt, job.sampling = await prompt_ids(job.wish, text), wire_sampling(job.wish, text)
        job.text, job.blocks = text, ()


def too_long(wish: Wish, prompt: int, wanted: int | None, context: int) -> ApiError:
    """Return the 400 of a request that does not fit the context."""
    asked = f"{prompt} in the prompt" + (f" and {wanted} to be generated" if wanted else "")
    return invalid(
        f"the context length is {context} tokens, but {prompt + (wanted or 1)} are needed: {asked}",
        "prompt" if wish.messages is None else "messages",
        "context_length_exceeded",
    )
