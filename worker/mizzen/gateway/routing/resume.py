"""When an answer whose engine is lost goes on in another one.

The engine that takes over gets the prompt and the tokens given so far (`Generate.generated`), and the seed
that the gateway fixed at the start, so that it draws the token at each position as the first one would have.
Tokens that were on their way when the engine was lost are drawn again, and are the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from mizzen.gateway.errors import ApiError
from mizzen.gateway.requests.attempt import Attempt
from mizzen.gateway.requests.routed_request import RoutedRequest
from mizzen.gateway.telemetry.metrics import Metrics
from mizzen.wire.client.stream import StreamLost

log = logging.getLogger(__name__)

MAX_HANDOVERS = 16
"""Engines that leave while they have a request: each hands it over, and that says nothing of the request."""
FINAL_CAUSES = frozenset({"slow", "closed"})
"""A reader that does not keep up would be given up again; a gateway that closes has no other engine. Neither
says anything of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeLimits:
    """How far an answer is followed."""

    max_resumes: int = 3
    """Engines that may be lost by one answer that has begun; 0 turns resuming off."""
    capacity_seconds: float = 60.0
    """How long an answer waits for room in the engines that serve."""
    replacement_seconds: float = 1.0
    """How long it waits for a replacement when none serves."""


class AnswerResumer:
    """Continues answers; `place` puts a job that has begun into another engine."""

    def __init__(
        self,
        limits: ResumeLimits,
        place: Callable[[RoutedRequest], Awaitable[Attempt]],
        serving: Callable[[], bool],
        metrics: Metrics,
    ) -> None:
        self.limits = limits
        self._serving = serving
        self._place = place
        self._metrics = metrics

    async def resume(self, running: Attempt, lost: StreamLost) -> Attempt | None:
        """Return the same answer in another engine; None when it may not go on.

        Raises:
            StreamLost: it was lost too often, or there is none in time.
        """
        routed, engine = running.routed, running.engine
        leaving = engine.draining
        running.stream.abort()
        running.release(lost.cause)
        if not leaving and lost.cause not in FINAL_CAUSES:
            engine.record_failure(running.breaker_period)
        if not self.limits.max_resumes or lost.cause in FINAL_CAUSES:
            return None
        self._count_loss(routed, lost, leaving)
        began = time.monotonic()
        routed.queue_entry.deadline = began + (
            self.limits.capacity_seconds if self._serving() else self.limits.replacement_seconds
        )
        routed.tried_engines[:] = [engine]
        self._metrics.resumes.labels("handover" if leaving else lost.cause).inc()
        try:
            other = await self._place(routed)
        except ApiError as error:
            self._metrics.resume_failures.labels("no_engine").inc()
            text = f"{lost}; no engine has taken over: {error}"
            raise StreamLost("no_engine", text) from error
        seconds = time.monotonic() - began
        self._metrics.resume_seconds.observe(seconds)
        fields = {
            "lost": engine.name,
            "cause": lost.cause,
            "engine": other.engine.name,
            "tokens": len(routed.generated),
            "seconds": round(seconds, 3),
        }
        log.info("answer resumed", extra={"fields": fields})
        return other

    def _count_loss(self, routed: RoutedRequest, lost: StreamLost, leaving: bool) -> None:
        """Count a loss.

        Raises:
            StreamLost: it was one too many.
        """
        if leaving:
            routed.handovers += 1
        else:
            routed.losses += 1
        if routed.losses > self.limits.max_resumes or routed.handovers > MAX_HANDOVERS:
            self._metrics.resume_failures.labels("too_many").inc()
            text = f"the request was lost by {routed.losses + routed.handovers} engines, the last time because: {lost}"
            raise StreamLost(lost.cause, text)
