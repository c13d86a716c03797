# SPDX-License-Identifier: Apache-2.0
"""Dispatcher: takes a request through admission, tokenization and routing to an engine, and retries failures.

Each service has one. Sequences and the embedding endpoints call it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from mizzen.core.kv.block_hashes import BLOCK_TOKENS
from mizzen.gateway.admission.admission import Admission
from mizzen.gateway.engines.engine_client import EngineClient
from mizzen.gateway.engines.engine_table import EngineTable
from mizzen.gateway.errors import ApiError, unavailable
from mizzen.gateway.requests.attempt import Attempt
from mizzen.gateway.requests.engine_request import choose_pooling, refusal_error
from mizzen.gateway.requests.images import sent_images
from mizzen.gateway.requests.routed_request import RETRY_SECONDS, RoutedRequest, context_length_error
from mizzen.gateway.routing.interfaces import EXPECTED_OUTPUT_TOKENS, RoutingQuery
from mizzen.gateway.routing.resume import AnswerResumer, ResumeLimits
from mizzen.gateway.routing.router import Router, Verdict, route_header
from mizzen.gateway.telemetry.metrics import Metrics
from mizzen.gateway.text.model import TooManyTokens
from mizzen.wire.client.stream import EngineOverloaded, EngineRefused, StreamLost
from mizzen.wire.messages import RefusalCode

MIN_ENGINE_SECONDS = 30.0
"""Lowest limit on a request's wait in an engine; it applies even if the request's deadline is nearer."""
REFUSAL_MARGIN_SECONDS = 15.0
"""Time that the gateway waits beyond the limit given to an engine, so that the engine can refuse first."""
BACKOFF_SECONDS = 0.5
"""Back-off for an engine that was too busy for a request, unless the engine requests a different one."""
BLAMELESS_CAUSES = frozenset({"suspect"})
"""Causes of losses that do not count towards a request's maximum number of losses."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EmbeddingResult:
    """Embedding of a prompt or its labels' logits, and the numbers of prompt tokens and of cached tokens."""

    vector: np.ndarray
    """Embedding, float32 [size], or logits, float32 [labels]."""
    prompt_tokens: int
    cached_tokens: int


class Dispatcher:
    """Places requests on engines, and places them again if an engine refuses or loses them."""

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
        """Create the dispatcher of a service, to which `table` and `admission` belong.

        If no engine serves, a request's deadline is at least `wake_seconds` after its arrival.
        """
        self._table = table
        self._admission = admission
        self._router = router
        self._metrics = metrics
        self._max_attempts = max_attempts
        self._wake_seconds = wake_seconds
        self._resumer = AnswerResumer(resume or ResumeLimits(), self.place, lambda: table.serving, metrics)

    async def place(self, routed: RoutedRequest) -> Attempt:
        """Send a request to an engine; return the attempt once the engine has returned tokens.

        Raises:
            ApiError: the request is invalid, or could not be served in time.
        """
        return await self._run(routed, self._generate)

    async def embed(
        self,
        routed: RoutedRequest,
        pooling: str | None = None,
        normalize: bool = True,
        classify: bool = False,
    ) -> EmbeddingResult:
        """Return the embedding of a prompt; `pooling` is "last", "mean", "cls" or None for the model's own.

        With `classify`, the vector has a classifier's logits instead. The caller must call `finish`
        afterwards, even if this raises an error.

        Raises:
            ApiError: the request is invalid, or could not be served in time.
        """

        async def embed_once(routed: RoutedRequest, engine: EngineClient) -> EmbeddingResult | None:
            kind = "last" if classify else choose_pooling(pooling, routed.text_model, engine.link.own_pooling)
            return await self._embed(routed, engine, kind, normalize, classify)

        result = await self._run(routed, embed_once)
        routed.queue_entry.served = True
        return result

    def finish(self, routed: RoutedRequest) -> None:
        """Charge a request's tokens to its tenant; the request then no longer counts as in flight."""
        if not routed.admitted:
            self._admission.settle(routed.queue_entry)
            return
        routed.admitted = False
        routed.queue_entry.prompt_tokens = len(routed.prompt)
        routed.queue_entry.output_tokens = routed.queue_entry.output_tokens or len(routed.generated)
        self._admission.leave(routed.queue_entry)

    def handle_loss(self, routed: RoutedRequest, engine: EngineClient, error: StreamLost) -> None:
        """Reset a request that `engine` lost, so that it starts over. No output may have reached the client.

        Raises:
            ApiError: the request was lost too often, or the gateway is shutting down.
        """
        if error.cause == "closed":
            raise self.stream_error(error)
        if routed.generated and self._resumer.limits.max_resumes:  # already resumed as often as allowed
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
        """Return the error to send to the client if an answer that has begun cannot continue."""
        closed_reason = self._admission.closed_reason
        if closed_reason is not None and isinstance(error, StreamLost) and error.cause == "closed":
            text = f"the answer was interrupted: {closed_reason}; send the request again"
            return unavailable(text, code="engine_lost")
        return ApiError(502, f"the answer was interrupted: {error}", code="engine_lost")

    async def explain(self, routed: RoutedRequest) -> list[Verdict[EngineClient]]:
        """Return the router's verdict on each engine for a request, without sending the request.

        Raises:
            ApiError: 400 if the prompt is invalid, 503 if no engine serves, because tokenization needs one.
        """
        query = await self._routing_query(routed)
        if query is None:
            raise unavailable(self._table.unavailable_reason())
        return self._router.explain(query, self._table)

    # ── attempts ──────────────────────────────────────────────────────────────────────────────────────────

    async def _run(
        self, routed: RoutedRequest, work: Callable[[RoutedRequest, EngineClient], Awaitable[T | None]]
    ) -> T:
        """Admit a request, then choose engines and call `work` for them until it returns a result."""
        if not routed.admitted:
            self._extend_for_wakeup(routed)
            began = time.monotonic()
            await self._admission.enter(routed.queue_entry)
            routed.admitted = True
            routed.record.end_phase("queue", began)
        while True:
            engine = await self._choose_engine(routed)
            if engine is None or len(routed.tried_engines) >= self._max_attempts:
                routed.tried_engines.clear()
                await self._requeue(routed)
                continue
            result = await work(routed, engine)
            if result is not None:
                routed.tried_engines.clear()
                return result

    def _extend_for_wakeup(self, routed: RoutedRequest) -> None:
        """If no engine serves, extend a request's deadline by the time that starting an engine takes."""
        if self._wake_seconds and not self._table.serving:
            deadline = time.monotonic() + self._wake_seconds
            routed.queue_entry.deadline = max(routed.queue_entry.deadline, deadline)

    async def _requeue(self, routed: RoutedRequest) -> None:
        entry = routed.queue_entry
        # If `requeue` fails, it has released the entry's place and charges these tokens.
        routed.admitted = False
        entry.prompt_tokens = len(routed.prompt)
        entry.output_tokens = len(routed.generated) * routed.generation.stream
        await self._admission.requeue(entry, routed.retry_seconds)
        entry.output_tokens = 0
        routed.admitted = True

    async def _generate(self, routed: RoutedRequest, engine: EngineClient) -> Attempt | None:
        """Return an attempt that has its first tokens; None if this engine returned no tokens."""
        seconds = self._engine_seconds(routed)
        tokens = routed.engine_prompt
        matched_blocks = engine.prefixes.match_prefix(routed.block_hashes)
        record = routed.record.new_attempt(engine.name, routed.route_reason)
        try:
            stream = engine.link.generate(
                tokens.astype("<i4", copy=False).tobytes(),
                routed.sampling_with_seed(),
                salt=routed.salt,
                priority=routed.priority,
                queue_seconds=seconds,
                generated=len(routed.generated),
                tenant=routed.queue_entry.tenant.tag,
                traceparent=record.traceparent,
                images=sent_images(routed.images),
            )
        except (EngineOverloaded, StreamLost) as error:
            self._handle_send_failure(routed, engine, error)
            return None
        engine.prefixes.add_guesses(routed.block_hashes)
        cost = len(tokens) - matched_blocks * BLOCK_TOKENS + self._expected_output_tokens(routed)
        attempt = Attempt(routed, engine, stream, record, cost, self._resumer.resume)
        routed.record.add_attempt(record)
        try:
            await attempt.wait_first_tokens(seconds + REFUSAL_MARGIN_SECONDS)
        except EngineRefused as refusal:
            attempt.close("refused")
            engine.breaker.cancel_request(attempt.breaker_period)
            engine.prefixes.retract_guesses(routed.block_hashes[matched_blocks:])
            self._handle_refusal(routed, engine, refusal)
            return None
        except StreamLost as error:
            attempt.close(error.cause)
            self._handle_early_loss(routed, engine, error, attempt.breaker_period)
            return None
        except BaseException:
            attempt.close()
            engine.breaker.cancel_request(attempt.breaker_period)
            raise
        engine.record_success(attempt.breaker_period)
        if self._table.cache_warmer is not None and not routed.generated:
            self._table.cache_warmer.count_prompt(
                engine.tokenizer_hash, routed.text_block_hashes, routed.prompt, routed.salt
            )
        routed.record.first_token_received(record)
        return attempt

    async def _embed(
        self, routed: RoutedRequest, engine: EngineClient, pooling: str, normalize: bool, classify: bool
    ) -> EmbeddingResult | None:
        """Return the embedding of a prompt; None if this engine did not return it."""
        seconds, cost = self._engine_seconds(routed), float(len(routed.prompt))
        record = routed.record.new_attempt(engine.name, routed.route_reason)
        routed.record.add_attempt(record)
        engine.add_request(cost)
        period, settled = engine.breaker.begin_request(), False
        try:
            async with asyncio.timeout(seconds + REFUSAL_MARGIN_SECONDS):
                vector, prompt, cached = await engine.link.embed(
                    routed.prompt.astype("<i4", copy=False).tobytes(),
                    pooling,
                    normalize,
                    salt=routed.salt,
                    priority=routed.priority,
                    queue_seconds=seconds,
                    traceparent=record.traceparent,
                    classify=classify,
                    second_start=routed.second_start,
                )
            settled = True
            engine.record_success(period)
            routed.record.prompt_tokens += prompt
            routed.record.cached_tokens += cached
            return EmbeddingResult(vector, prompt, cached)
        except EngineRefused as refusal:
            self._handle_refusal(routed, engine, refusal)
        except EngineOverloaded as error:
            self._handle_send_failure(routed, engine, error)
        except (StreamLost, TimeoutError) as error:
            settled = True
            lost = error if isinstance(error, StreamLost) else StreamLost("no_answer", "no embedding arrived")
            self._handle_early_loss(routed, engine, lost, period)
        finally:
            if not settled:
                engine.breaker.cancel_request(period)
            record.end()
            engine.remove_request(cost)
        return None

    def _engine_seconds(self, routed: RoutedRequest) -> float:
        return max(MIN_ENGINE_SECONDS, routed.queue_entry.wait_deadline - time.monotonic())

    def _expected_output_tokens(self, routed: RoutedRequest) -> int:
        limit = routed.generation.sampling.max_tokens
        left = EXPECTED_OUTPUT_TOKENS if limit is None else max(1, limit - len(routed.generated))
        return min(left, EXPECTED_OUTPUT_TOKENS)

    # ── failures ──────────────────────────────────────────────────────────────────────────────────────────

    def _handle_send_failure(
        self, routed: RoutedRequest, engine: EngineClient, error: EngineOverloaded | StreamLost
    ) -> None:
        """Exclude an engine from a request's further attempts, because sending the request to it failed."""
        routed.tried_engines.append(engine)
        if isinstance(error, StreamLost):
            self._metrics.retries.labels(error.cause).inc()
            return
        engine.back_off(BACKOFF_SECONDS)
        self._metrics.retries.labels("overloaded").inc()

    def _handle_early_loss(
        self, routed: RoutedRequest, engine: EngineClient, error: StreamLost, period: int
    ) -> None:
        """Record that an engine lost a request before returning any token of it.

        Raises:
            ApiError: 503 if the request was lost too often to be tried again.
        """
        draining = engine.draining
        if not draining:
            engine.record_failure(period)
        else:
            engine.breaker.cancel_request(period)
        routed.tried_engines.append(engine)
        self._metrics.retries.labels(error.cause).inc()
        if draining or error.cause in BLAMELESS_CAUSES:
            return
        routed.losses += 1
        max_losses = self._resumer.limits.max_resumes + 1 if routed.generated else self._max_attempts
        if routed.losses >= max_losses:
            text = f"the request was lost by {routed.losses} engines, the last time because: {error}"
            raise unavailable(text, code="engine_lost")

    def _handle_refusal(self, routed: RoutedRequest, engine: EngineClient, refusal: EngineRefused) -> None:
        """Record that an engine refused a request, so that the request is tried elsewhere or later.

        Raises:
            ApiError: 400 if every engine would reject the request; 503 if its wait in this engine timed out.
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
        codes = {int(code): code.name.lower() for code in RefusalCode}
        self._metrics.retries.labels(codes.get(refusal.code, "refused")).inc()

    # ── routing ───────────────────────────────────────────────────────────────────────────────────────────

    async def _choose_engine(self, routed: RoutedRequest) -> EngineClient | None:
        query = await self._routing_query(routed)
        began = time.monotonic()
        route = self._router.route(query, self._table) if query is not None else None
        if route is None:
            if routed.images and not routed.generated:
                self._table.require_images()
            return None
        self._metrics.routes.labels(route.reason).inc()
        routed.route_header, routed.route_reason = route_header(route), route.reason
        routed.record.end_phase("route", began)
        return route.engine

    async def _routing_query(self, routed: RoutedRequest) -> RoutingQuery | None:
        """Tokenize a request and return it as the router sees it; None if no engine is available."""
        text = (
            routed.text_model
            if routed.generated
            else self._table.choose_text_model(routed.text_model, routed.tried_engines, routed.has_images)
        )
        if text is None:
            return None
        context = self._table.longest_context(text)
        if text is not routed.text_model:
            try:
                await routed.tokenize(text, 0 if routed.generated else context)
            except TooManyTokens as error:
                raise context_length_error(routed, context, error.at_least) from error
        if routed.context_tokens > context > 0 and not routed.generated:
            raise context_length_error(routed, context)
        if not routed.block_hashes and self._table.uses_block_hashes:
            routed.hash_blocks()
        return RoutingQuery(
            tokenizer_hash=text.name,
            prompt_tokens=len(routed.prompt),
            context_tokens=routed.context_tokens,
            output_tokens=self._expected_output_tokens(routed),
            block_hashes=routed.block_hashes,
            session=routed.session,
            pinned_model=routed.pinned_model,
            images=bool(routed.images),
            excluded=routed.tried_engines,
        )
