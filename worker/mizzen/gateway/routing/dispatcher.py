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
from mizzen.gateway.engines.engine_client import EngineClient
from mizzen.gateway.engines.engine_table import EngineTable
from mizzen.gateway.errors import ApiError, invalid, unavailable
from mizzen.gateway.requests.attempt import Attempt
from mizzen.gateway.requests.engine_request import choose_pooling, refusal_error
from mizzen.gateway.requests.routed_request import RETRY_SECONDS, RoutedRequest
from mizzen.gateway.routing.interfaces import EXPECTED_OUTPUT_TOKENS, RoutingQuery
from mizzen.gateway.routing.resume import AnswerResumer, ResumeLimits
from mizzen.gateway.routing.router import Route, Router, Verdict
from mizzen.gateway.telemetry.metrics import Metrics
from mizzen.gateway.text.model import TooManyTokens
from mizzen.wire.client.stream import EngineOverloaded, EngineRefused, StreamLost
from mizzen.wire.messages import RefusalCode

MIN_ENGINE_SECONDS = 30.0
"""A request that was placed may wait this long in its engine, even when its own deadline is nearer."""
REFUSAL_MARGIN_SECONDS = 15.0
"""An engine refuses by itself what waits there too long; it gets this much longer to say so."""
BACKOFF_SECONDS = 0.5
"""How long an engine that takes nothing now is left alone, unless it says so itself."""
BLAMELESS_CAUSES = frozenset({"suspect"})
"""Causes of a loss that say nothing of the request."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
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
        self._resumer = AnswerResumer(resume or ResumeLimits(), self.place, lambda: table.serving, metrics)

    async def place(self, routed: RoutedRequest) -> Attempt:
        """Return the request with its first tokens; with its next ones when it has begun already.

        Raises:
            ApiError: it cannot be served, or not in time.
        """
        return await self._run(routed, self._generate)

    async def embed(
        self, routed: RoutedRequest, pooling: str | None = None, normalize: bool = True
    ) -> EmbeddingResult:
        """Return the embedding of the job's prompt, `pooling` "last", "mean" or None, the model's own.

        `leave` must be called.

        Raises:
            ApiError: it cannot be served, or not in time.
        """

        async def one(routed: RoutedRequest, engine: EngineClient) -> EmbeddingResult | None:
            return await self._embed(routed, engine, choose_pooling(pooling, routed.text_model), normalize)

        found = await self._run(routed, one)
        routed.queue_entry.served = True
        return found

    def finish(self, routed: RoutedRequest) -> None:
        """End a request's time in work, or its prospect of any."""
        if not routed.admitted:
            self._admission.settle(routed.queue_entry)
            return
        routed.admitted = False
        routed.queue_entry.prompt_tokens = len(routed.prompt)
        routed.queue_entry.output_tokens = routed.queue_entry.output_tokens or len(routed.generated)
        self._admission.leave(routed.queue_entry)

    def handle_loss(self, routed: RoutedRequest, engine: EngineClient, error: StreamLost) -> None:
        """Note that an engine lost a request of which nothing has reached the client; it may start over.

        Raises:
            ApiError: it has been lost too often to be tried again.
        """
        if error.cause == "closed":
            raise self.stream_error(error)
        if routed.generated and self._resumer.limits.max_resumes:  # it was resumed as far as it may be
            raise unavailable(str(error), code="engine_lost")
        routed.discard_output()
        routed.tried_engines.append(engine)
        self._metrics.retries.labels(error.cause).inc()
        if error.cause in BLAMELESS_CAUSES or engine.draining:
            return
        routed.losses += 1
        if routed.losses >= self._max_attempts:
            text = f"the request was lost by {routed.losses} engines, the last time because: {error}"
            raise unavailable(text, code="engine_lost")

    def stream_error(self, error: StreamLost | EngineRefused) -> ApiError:
        """Return what a client is told of an answer that has begun and cannot go on."""
        closed = self._admission.closed_reason
        if closed is not None and isinstance(error, StreamLost) and error.cause == "closed":
            text = f"the answer broke off: {closed}; send the request again"
            return unavailable(text, code="engine_lost")
        return ApiError(502, f"the answer broke off: {error}", code="engine_lost")

    async def explain(self, routed: RoutedRequest) -> list[Verdict[EngineClient]]:
        """Return what routing thinks of each engine for a request that is not sent.

        Raises:
            ApiError: its prompt cannot be made; 503 when no engine serves, for then nothing can tokenize.
        """
        request = await self._routing_query(routed)
        if request is None:
            raise unavailable(self._table.unavailable_reason())
        return self._router.explain(request, self._table)

    # ── attempts ──────────────────────────────────────────────────────────────────────────────────────────

    async def _run(
        self, routed: RoutedRequest, work: Callable[[RoutedRequest, EngineClient], Awaitable[T | None]]
    ) -> T:
        """Route and try until an engine gives something."""
        if not routed.admitted:
            self._extend_for_wakeup(routed)
            began = time.monotonic()
            await self._admission.enter(routed.queue_entry)
            routed.admitted = True
            if routed.record is not None:
                routed.record.end_phase("queue", began)
        while True:
            engine = await self._choose_engine(routed)
            if engine is None or len(routed.tried_engines) >= self._max_attempts:
                routed.tried_engines.clear()
                await self._requeue(routed)
                continue
            found = await work(routed, engine)
            if found is not None:
                routed.tried_engines.clear()
                return found

    def _extend_for_wakeup(self, routed: RoutedRequest) -> None:
        """Give a request that finds no engine the time that waking one takes."""
        if self._wake_seconds and not self._table.serving:
            routed.queue_entry.deadline = max(
                routed.queue_entry.deadline, time.monotonic() + self._wake_seconds
            )

    async def _requeue(self, routed: RoutedRequest) -> None:
        queue_entry = routed.queue_entry
        routed.admitted = False  # `again` gives the turn back, also when it fails, and charges this then
        queue_entry.prompt_tokens, queue_entry.output_tokens = (
            len(routed.prompt),
            len(routed.generated) * routed.generation.stream,
        )
        await self._admission.requeue(queue_entry, routed.retry_seconds)
        queue_entry.output_tokens = 0
        routed.admitted = True

    async def _generate(self, routed: RoutedRequest, engine: EngineClient) -> Attempt | None:
        """Return the request with its first tokens; None when this engine does not give any."""
        seconds = self._engine_seconds(routed)
        tokens = routed.engine_prompt
        matched = engine.prefixes.match_prefix(routed.block_hashes)
        try:
            stream = engine.link.generate(
                tokens.astype("<i4", copy=False).tobytes(),
                routed.sampling_with_seed(),
                salt=routed.salt,
                priority=routed.priority,
                queue_seconds=seconds,
                generated=len(routed.generated),
                tenant=routed.queue_entry.tenant.tag,
            )
        except (EngineOverloaded, StreamLost) as error:
            self._handle_send_failure(routed, engine, error)
            return None
        engine.prefixes.add_guesses(routed.block_hashes)
        cost = len(tokens) - matched * BLOCK_TOKENS + self._expected_output_tokens(routed)
        running = Attempt(routed, engine, stream, cost, self._resumer.resume)
        if routed.record is not None:
            running.record = routed.record.start_attempt(engine.name, routed.route_reason)
        try:
            await running.wait_first_tokens(seconds + REFUSAL_MARGIN_SECONDS)
        except EngineRefused as refusal:
            running.close("refused")
            engine.breaker.cancel_request(running.breaker_period)
            engine.prefixes.retract_guesses(routed.block_hashes[matched:])
            self._handle_refusal(routed, engine, refusal)
            return None
        except StreamLost as error:
            running.close(error.cause)
            self._handle_early_loss(routed, engine, error, running.breaker_period)
            return None
        except BaseException:
            running.close()
            engine.breaker.cancel_request(running.breaker_period)
            raise
        engine.record_success(running.breaker_period)
        if self._table.cache_warmer is not None and not routed.generated:
            self._table.cache_warmer.count_prompt(
                engine.tokenizer_hash, routed.block_hashes, routed.prompt, routed.salt
            )
        if routed.record is not None and running.record is not None:
            routed.record.first_token_received(running.record)
        return running

    async def _embed(
        self, routed: RoutedRequest, engine: EngineClient, pooling: str, normalize: bool
    ) -> EmbeddingResult | None:
        """Return the embedding; None when this engine does not give one."""
        seconds, cost = self._engine_seconds(routed), float(len(routed.prompt))
        attempt = (
            routed.record.start_attempt(engine.name, routed.route_reason)
            if routed.record is not None
            else None
        )
        engine.add_request(cost)
        period = engine.breaker.begin_request()
        settled = False
        try:
            async with asyncio.timeout(seconds + REFUSAL_MARGIN_SECONDS):
                vector, prompt, cached = await engine.link.embed(
                    routed.prompt.astype("<i4", copy=False).tobytes(),
                    pooling,
                    normalize,
                    salt=routed.salt,
                    priority=routed.priority,
                    queue_seconds=seconds,
                )
            settled = True
            engine.record_success(period)
            if routed.record is not None:
                routed.record.prompt_tokens += prompt
                routed.record.cached_tokens += cached
            return EmbeddingResult(vector, prompt, cached)
        except EngineRefused as refusal:
            self._handle_refusal(routed, engine, refusal)
        except EngineOverloaded as error:
            self._handle_send_failure(routed, engine, error)
        except (StreamLost, TimeoutError) as error:
            settled = True
            lost = error if isinstance(error, StreamLost) else StreamLost("no_answer", "no embedding came")
            self._handle_early_loss(routed, engine, lost, period)
        finally:
            if not settled:
                engine.breaker.cancel_request(period)
            if attempt is not None:
                attempt.end()
            engine.remove_request(cost)
        return None

    def _engine_seconds(self, routed: RoutedRequest) -> float:
        return max(MIN_ENGINE_SECONDS, routed.queue_entry.wait_deadline - time.monotonic())

    def _expected_output_tokens(self, routed: RoutedRequest) -> int:
        asked = routed.generation.sampling.max_tokens
        left = EXPECTED_OUTPUT_TOKENS if asked is None else max(1, asked - len(routed.generated))
        return min(left, EXPECTED_OUTPUT_TOKENS)

    # ── failures ──────────────────────────────────────────────────────────────────────────────────────────

    def _handle_send_failure(
        self, routed: RoutedRequest, engine: EngineClient, error: EngineOverloaded | StreamLost
    ) -> None:
        """Note that a request could not even be sent."""
        routed.tried_engines.append(engine)
        if isinstance(error, StreamLost):
            self._metrics.retries.labels(error.cause).inc()
            return
        engine.back_off(BACKOFF_SECONDS)
        self._metrics.retries.labels("overloaded").inc()

    def _handle_early_loss(
        self, routed: RoutedRequest, engine: EngineClient, error: StreamLost, period: int
    ) -> None:
        """Note that an engine lost a request before its first token, or its next one after a resume.

        Raises:
            ApiError: it has been lost too often to be tried again.
        """
        leaving = engine.draining
        if not leaving:
            engine.record_failure(period)
        else:
            engine.breaker.cancel_request(period)
        routed.tried_engines.append(engine)
        self._metrics.retries.labels(error.cause).inc()
        if leaving or error.cause in BLAMELESS_CAUSES:
            return
        routed.losses += 1
        most = self._resumer.limits.max_resumes + 1 if routed.generated else self._max_attempts
        if routed.losses >= most:
            text = f"the request was lost by {routed.losses} engines, the last time because: {error}"
            raise unavailable(text, code="engine_lost")

    def _handle_refusal(self, routed: RoutedRequest, engine: EngineClient, refusal: EngineRefused) -> None:
        """Note that an engine did not take the request.

        Raises:
            ApiError: no other would.
        """
        if refusal.code == RefusalCode.INVALID:
            raise refusal_error(routed.generation, str(refusal))
        siblings = routed.queue_entry.siblings
        if refusal.code == RefusalCode.QUEUE_TIMEOUT and (siblings is None or not siblings.may_wait):
            raise unavailable(str(refusal), code="queue_timeout")
        routed.tried_engines.append(engine)
        if refusal.code in (RefusalCode.BUSY, RefusalCode.QUEUE_TIMEOUT):
            routed.retry_seconds = max(RETRY_SECONDS, refusal.retry_after_seconds)
        else:
            engine.back_off(refusal.retry_after_seconds or BACKOFF_SECONDS)
        known = {int(code): code.name.lower() for code in RefusalCode}
        self._metrics.retries.labels(known.get(refusal.code, "refused")).inc()

    # ── routing ───────────────────────────────────────────────────────────────────────────────────────────

    async def _choose_engine(self, routed: RoutedRequest) -> EngineClient | None:
        request = await self._routing_query(routed)
        began = time.monotonic()
        route = self._router.route(request, self._table) if request is not None else None
        if route is None:
            return None
        self._metrics.routes.labels(route.reason).inc()
        routed.route_header, routed.route_reason = route_header(route), route.reason
        if routed.record is not None:
            routed.record.end_phase("route", began)
        return route.engine

    async def _routing_query(self, routed: RoutedRequest) -> RoutingQuery | None:
        """Return the request as routing sees it; None when no engine is there to tokenize for."""
        text = (
            routed.text_model
            if routed.generated
            else self._table.choose_text_model(routed.text_model, routed.tried_engines)
        )
        if text is None:
            return None
        context = self._table.longest_context(text)
        if text is not routed.text_model:
            try:
                await routed.tokenize(text, 0 if routed.generated else context)
            except TooManyTokens as error:
                raise context_length_error(routed, context, error.least) from error
        if routed.context_tokens > context > 0 and not routed.generated:
            raise context_length_error(routed, context)
        cache_warmer = self._table.cache_warmer
        if not routed.block_hashes and (
            len(self._table) > 1 or (cache_warmer is not None and cache_warmer.enabled)
        ):
            routed.block_hashes = tuple(block_hashes(routed.prompt, routed.salt))
        return RoutingQuery(
            tokenizer_hash=text.name,
            prompt_tokens=len(routed.prompt),
            context_tokens=routed.context_tokens,
            output_tokens=self._expected_output_tokens(routed),
            block_hashes=routed.block_hashes,
            session=routed.session,
            pinned_model=routed.pinned_model,
            excluded=routed.tried_engines,
        )


def route_header(route: Route[EngineClient]) -> str:
    """Return a route as the header `x-mizzen-route` tells it."""
    name = "".join(letter if "!" <= letter <= "~" and letter != ";" else "_" for letter in route.engine.name)
    return f"engine={name}; reason={route.reason}; matched={route.matched_tokens}"


def context_length_error(routed: RoutedRequest, context: int, least: int = 0) -> ApiError:
    """Return the 400 of a request that does not fit the context; `least` tokens are in a prompt not made."""
    if least:
        return invalid(
            f"the context length is {context} tokens, but the prompt has at least {least}",
            routed.generation.prompt_field,
            "context_length_exceeded",
        )
    prompt, wanted = (
        len(routed.prompt),
        routed.generation.sampling.max_tokens if routed.generation.max_tokens_given else None,
    )
    asked = f"{prompt} in the prompt" + (f" and {wanted} to be generated" if wanted else "")
    return invalid(
        f"the context length is {context} tokens, but {prompt + (wanted or 1)} are needed: {asked}",
        routed.generation.prompt_field,
        "context_length_exceeded",
    )
