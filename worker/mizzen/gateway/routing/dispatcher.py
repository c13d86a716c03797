"""From a request to the engine that runs it: admission, tokenizing, routing, and retries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from mizzen.core.kv.block_hashes import BLOCK_TOKENS, block_hashes
from mizzen.gateway.admission.admission import Admission
from mizzen.gateway.engines.engine_table import Engine, EngineTable
from mizzen.gateway.errors import ApiError, invalid, unavailable
from mizzen.gateway.requests.attempt import Running
from mizzen.gateway.requests.engine_request import refused, wire_pooling
from mizzen.gateway.requests.routed_request import PAUSE_SECONDS, Job
from mizzen.gateway.routing.interfaces import EXPECTED_OUTPUT_TOKENS, RouteRequest
from mizzen.gateway.routing.resume import ResumeLimits, Resumes
from mizzen.gateway.routing.router import Route, Router, Verdict
from mizzen.gateway.telemetry.metrics import Metrics
from mizzen.gateway.text.model import TooManyTokens
from mizzen.wire.client.stream import EngineOverloaded, EngineRefused, StreamLost
from mizzen.wire.messages import RefusalCode

__all__ = ["Dispatcher", "Embedded", "Job", "Running"]

MIN_ENGINE_SECONDS = 30.0
"""A request that was placed may wait this long in its engine, even when its own deadline is nearer."""
ANSWER_MARGIN_SECONDS = 15.0
"""An engine refuses by itself what waits there too long; it gets this much longer to say so."""
REFUSAL_SECONDS = 0.5
"""How long an engine that takes nothing now is left alone, unless it says so itself."""
BLAMELESS = frozenset({"suspect"})
"""Causes of a loss that say nothing of the request."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Embedded:
    """The embedding of a prompt."""

    vector: np.ndarray
    """float32 [hidden size]."""
    prompt_tokens: int
    cached_tokens: int


class Dispatcher:
    """Places requests in engines, and again when an engine is lost."""

    def __init__(
        self,
        table: EngineTable,
        admission: Admission,
        router: Router,
        metrics: Metrics,
        max_attempts: int,
        *,
        resume: ResumeLimits | None = None,
        wake_seconds: float = 0.0,
    ) -> None:
        """Take the gateway's parts. Requests wait `wake_seconds` for a first engine where there is none."""
        self._table = table
        self._admission = admission
        self._router = router
        self._metrics = metrics
        self._max_attempts = max_attempts
        self._wake_seconds = wake_seconds
        self._resumes = Resumes(resume or ResumeLimits(), self.place, lambda: table.serving, metrics)

    async def place(self, job: Job) -> Running:
        """Return the request with its first tokens; with its next ones when it has begun already.

        Raises:
            ApiError: it cannot be served, or not in time.
        """
        return await self._attempt(job, self._generate)

    async def embed(self, job: Job, pooling: str | None = None, normalize: bool = True) -> Embedded:
        """Return the embedding of the job's prompt, `pooling` "last", "mean" or None, the model's own.

        `leave` must be called.

        Raises:
            ApiError: it cannot be served, or not in time.
        """

        async def one(job: Job, engine: Engine) -> Embedded | None:
            return await self._embed(job, engine, wire_pooling(pooling, job.text), normalize)

        found = await self._attempt(job, one)
        job.ticket.served = True
        return found

    def leave(self, job: Job) -> None:
        """End a request's time in work, or its prospect of any."""
        if not job.admitted:
            self._admission.settle(job.ticket)
            return
        job.admitted = False
        job.ticket.prompt_tokens = len(job.prompt)
        job.ticket.output_tokens = job.ticket.output_tokens or len(job.given)
        self._admission.leave(job.ticket)

    def lost(self, job: Job, engine: Engine, error: StreamLost) -> None:
        """Note that an engine lost a request of which nothing has reached the client; it may start over.

        Raises:
            ApiError: it has been lost too often to be tried again.
        """
        if error.cause == "closed":
            raise self.broke_off(error)
        if job.given and self._resumes.limits.resumes:  # it was resumed as far as it may be
            raise unavailable(str(error), code="engine_lost")
        job.start_over()
        job.tried.append(engine)
        self._metrics.retries.labels(error.cause).inc()
        if error.cause in BLAMELESS or engine.draining:
            return
        job.losses += 1
        if job.losses >= self._max_attempts:
            text = f"the request was lost by {job.losses} engines, the last time because: {error}"
            raise unavailable(text, code="engine_lost")

    def broke_off(self, error: StreamLost | EngineRefused) -> ApiError:
        """Return what a client is told of an answer that has begun and cannot go on."""
        closed = self._admission.closed
        if closed is not None and isinstance(error, StreamLost) and error.cause == "closed":
            text = f"the answer broke off: {closed}; send the request again"
            return unavailable(text, code="engine_lost")
        return ApiError(502, f"the answer broke off: {error}", code="engine_lost")

    async def explain(self, job: Job) -> list[Verdict[Engine]]:
        """Return what routing thinks of each engine for a request that is not sent.

        Raises:
            ApiError: its prompt cannot be made; 503 when no engine serves, for then nothing can tokenize.
        """
        request = await self._request(job)
        if request is None:
            raise unavailable(self._table.why_closed())
        return self._router.explain(request, self._table)

    # ── attempts ──────────────────────────────────────────────────────────────────────────────────────────

    async def _attempt(self, job: Job, work: Callable[[Job, Engine], Awaitable[T | None]]) -> T:
        """Route and try until an engine gives something."""
        if not job.admitted:
            self._hold(job)
            began = time.monotonic()
            await self._admission.enter(job.ticket)
            job.admitted = True
            if job.record is not None:
                job.record.phase("queue", began)
        while True:
            engine = await self._route(job)
            if engine is None or len(job.tried) >= self._max_attempts:
                job.tried.clear()
                await self._queue_again(job)
                continue
            found = await work(job, engine)
            if found is not None:
                job.tried.clear()
                return found

    def _hold(self, job: Job) -> None:
        """Give a request that finds no engine the time that waking one takes."""
        if self._wake_seconds and not self._table.serving:
            job.ticket.deadline = max(job.ticket.deadline, time.monotonic() + self._wake_seconds)

    async def _queue_again(self, job: Job) -> None:
        ticket = job.ticket
        job.admitted = False  # `again` gives the turn back, also when it fails, and charges this then
        ticket.prompt_tokens, ticket.output_tokens = len(job.prompt), len(job.given) * job.wish.stream
        await self._admission.again(ticket, job.pause_seconds)
        ticket.output_tokens = 0
        job.admitted = True

    async def _generate(self, job: Job, engine: Engine) -> Running | None:
        """Return the request with its first tokens; None when this engine does not give any."""
        seconds = self._seconds(job)
        tokens = job.tokens
        matched = engine.prefixes.match(job.blocks)
        try:
            stream = engine.link.generate(
                tokens.astype("<i4", copy=False).tobytes(),
                job.sampling_in_force(),
                salt=job.salt,
                priority=job.priority,
                queue_seconds=seconds,
                generated=len(job.given),
                tenant=job.ticket.tenant.tag,
            )
        except (EngineOverloaded, StreamLost) as error:
            self._unsent(job, engine, error)
            return None
        engine.prefixes.guess(job.blocks)
        cost = len(tokens) - matched * BLOCK_TOKENS + self._answer_tokens(job)
        running = Running(job, engine, stream, cost, self._resumes.resume)
        if job.record is not None:
            running.attempt = job.record.attempt(engine.name, job.reason)
        try:
            await running.begin(seconds + ANSWER_MARGIN_SECONDS)
        except EngineRefused as refusal:
            running.close("refused")
            engine.breaker.cancel(running.period)
            engine.prefixes.doubt(job.blocks[matched:])
            self._refused(job, engine, refusal)
            return None
        except StreamLost as error:
            running.close(error.cause)
            self._lost_early(job, engine, error, running.period)
            return None
        except BaseException:
            running.close()
            engine.breaker.cancel(running.period)
            raise
        engine.succeeded(running.period)
        if self._table.warmer is not None and not job.given:
            self._table.warmer.saw(engine.tokenizer_hash, job.blocks, job.prompt, job.salt)
        if job.record is not None and running.attempt is not None:
            job.record.token(running.attempt)
        return running

    async def _embed(self, job: Job, engine: Engine, pooling: str, normalize: bool) -> Embedded | None:
        """Return the embedding; None when this engine does not give one."""
        seconds, cost = self._seconds(job), float(len(job.prompt))
        attempt = job.record.attempt(engine.name, job.reason) if job.record is not None else None
        engine.take(cost)
        period = engine.breaker.begin()
        settled = False
        try:
            async with asyncio.timeout(seconds + ANSWER_MARGIN_SECONDS):
                vector, prompt, cached = await engine.link.embed(
                    job.prompt.astype("<i4", copy=False).tobytes(),
                    pooling,
                    normalize,
                    salt=job.salt,
                    priority=job.priority,
                    queue_seconds=seconds,
                )
            settled = True
            engine.succeeded(period)
            if job.record is not None:
                job.record.prompt_tokens += prompt
                job.record.cached_tokens += cached
            return Embedded(vector, prompt, cached)
        except EngineRefused as refusal:
            self._refused(job, engine, refusal)
        except EngineOverloaded as error:
            self._unsent(job, engine, error)
        except (StreamLost, TimeoutError) as error:
            settled = True
            lost = error if isinstance(error, StreamLost) else StreamLost("no_answer", "no embedding came")
            self._lost_early(job, engine, lost, period)
        finally:
            if not settled:
                engine.breaker.cancel(period)
            if attempt is not None:
                attempt.end()
            engine.release(cost)
        return None

    def _seconds(self, job: Job) -> float:
        return max(MIN_ENGINE_SECONDS, job.ticket.ends - time.monotonic())

    def _answer_tokens(self, job: Job) -> int:
        asked = job.wish.sampling.max_tokens
        left = EXPECTED_OUTPUT_TOKENS if asked is None else max(1, asked - len(job.given))
        return min(left, EXPECTED_OUTPUT_TOKENS)

    # ── failures ──────────────────────────────────────────────────────────────────────────────────────────

    def _unsent(self, job: Job, engine: Engine, error: EngineOverloaded | StreamLost) -> None:
        """Note that a request could not even be sent."""
        job.tried.append(engine)
        if isinstance(error, StreamLost):
            self._metrics.retries.labels(error.cause).inc()
            return
        engine.leave_alone(REFUSAL_SECONDS)
        self._metrics.retries.labels("overloaded").inc()

    def _lost_early(self, job: Job, engine: Engine, error: StreamLost, period: int) -> None:
        """Note that an engine lost a request before its first token, or its next one after a resume.

        Raises:
            ApiError: it has been lost too often to be tried again.
        """
        leaving = engine.draining
        if not leaving:
            engine.failed(period)
        else:
            engine.breaker.cancel(period)
        job.tried.append(engine)
        self._metrics.retries.labels(error.cause).inc()
        if leaving or error.cause in BLAMELESS:
            return
        job.losses += 1
        most = self._resumes.limits.resumes + 1 if job.given else self._max_attempts
        if job.losses >= most:
            text = f"the request was lost by {job.losses} engines, the last time because: {error}"
            raise unavailable(text, code="engine_lost")

    def _refused(self, job: Job, engine: Engine, refusal: EngineRefused) -> None:
        """Note that an engine did not take the request.

        Raises:
            ApiError: no other would.
        """
        if refusal.code == RefusalCode.INVALID:
            raise refused(job.wish, str(refusal))
        siblings = job.ticket.siblings
        if refusal.code == RefusalCode.QUEUE_TIMEOUT and (siblings is None or not siblings.go_on):
            raise unavailable(str(refusal), code="queue_timeout")
        job.tried.append(engine)
        if refusal.code in (RefusalCode.BUSY, RefusalCode.QUEUE_TIMEOUT):
            job.pause_seconds = max(PAUSE_SECONDS, refusal.retry_after_seconds)
        else:
            engine.leave_alone(refusal.retry_after_seconds or REFUSAL_SECONDS)
        known = {int(code): code.name.lower() for code in RefusalCode}
        self._metrics.retries.labels(known.get(refusal.code, "refused")).inc()

    # ── routing ───────────────────────────────────────────────────────────────────────────────────────────

    async def _route(self, job: Job) -> Engine | None:
        request = await self._request(job)
        began = time.monotonic()
        route = self._router.route(request, self._table) if request is not None else None
        if route is None:
            return None
        self._metrics.routes.labels(route.reason).inc()
        job.route, job.reason = described(route), route.reason
        if job.record is not None:
            job.record.phase("route", began)
        return route.engine

    async def _request(self, job: Job) -> RouteRequest | None:
        """Return the request as routing sees it; None when no engine is there to tokenize for."""
        text = job.text if job.given else self._table.choose_text(job.text, job.tried)
        if text is None:
            return None
        context = self._table.longest_context(text)
        if text is not job.text:
            try:
                await job.tokenize(text, 0 if job.given else context)
            except TooManyTokens as error:
                raise too_long(job, context, error.least) from error
        if job.needed_tokens > context > 0 and not job.given:
            raise too_long(job, context)
        warmer = self._table.warmer
        if not job.blocks and (len(self._table) > 1 or (warmer is not None and warmer.on)):
            job.blocks = tuple(block_hashes(job.prompt, job.salt))
        return RouteRequest(
            tokenizer_hash=text.name,
            prompt_tokens=len(job.prompt),
            needed_tokens=job.needed_tokens,
            answer_tokens=self._answer_tokens(job),
            blocks=job.blocks,
            session=job.session,
            pin=job.pin,
            excluded=job.tried,
        )


def described(route: Route[Engine]) -> str:
    """Return a route as the header `x-mizzen-route` tells it."""
    name = "".join(letter if "!" <= letter <= "~" and letter != ";" else "_" for letter in route.engine.name)
    return f"engine={name}; reason={route.reason}; matched={route.matched_tokens}"


def too_long(job: Job, context: int, least: int = 0) -> ApiError:
    """Return the 400 of a request that does not fit the context; `least` tokens are in a prompt not made."""
    if least:
        return invalid(
            f"the context length is {context} tokens, but the prompt has at least {least}",
            job.wish.prompt_field,
            "context_length_exceeded",
        )
    prompt, wanted = len(job.prompt), job.wish.sampling.max_tokens if job.wish.max_tokens_given else None
    asked = f"{prompt} in the prompt" + (f" and {wanted} to be generated" if wanted else "")
    return invalid(
        f"the context length is {context} tokens, but {prompt + (wanted or 1)} are needed: {asked}",
        job.wish.prompt_field,
        "context_length_exceeded",
    )
