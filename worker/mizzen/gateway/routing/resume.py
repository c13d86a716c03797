# SPDX-License-Identifier: Apache-2.0
"""Resumes an answer on another engine if its engine is lost.

The new engine gets the prompt, the tokens generated so far (`Generate.generated`), and the seed that the
gateway chose at the start. It thus samples the same token at each position: tokens that were in transit when
the engine was lost are sampled again, with the same result.
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
"""Maximum number of draining engines that may hand over one request.

Handovers do not count towards `ResumeLimits.max_resumes`.
"""
FINAL_CAUSES = frozenset({"slow", "closed"})
"""Causes of a loss that are not failures of the engine, and after which the answer is not resumed.

A client that reads too slowly (`slow`) would lose the next stream too; `closed` is the gateway's shutdown.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeLimits:
    """Limits for resuming one answer."""

    max_resumes: int = 3
    """Maximum number of engines that one answer may lose; 0 turns resuming off."""
    capacity_seconds: float = 60.0
    """Maximum time that an answer waits for capacity on another engine, if any engine serves."""
    replacement_seconds: float = 1.0
    """Maximum time that an answer waits for a new engine, if no engine serves."""


class AnswerResumer:
    """Resumes answers whose engine was lost, on the engines of one service."""

    def __init__(
        self,
        limits: ResumeLimits,
        place: Callable[[RoutedRequest], Awaitable[Attempt]],
        serving: Callable[[], bool],
        metrics: Metrics,
    ) -> None:
        """Create a resumer.

        Args:
            limits: limits for each answer.
            place: sends to an engine a request whose answer has begun; returns the new attempt.
            serving: returns whether any engine serves.
            metrics: metrics of the gateway.
        """
        self.limits = limits
        self._serving = serving
        self._place = place
        self._metrics = metrics

    async def resume(self, attempt: Attempt, lost: StreamLost) -> Attempt | None:
        """Return an attempt that continues the answer on another engine; None if it may not be resumed.

        Raises:
            StreamLost: the answer was lost too often, or no engine took it over in time.
        """
        routed, engine = attempt.routed, attempt.engine
        draining = engine.draining
        attempt.stream.abort()
        attempt.release(lost.cause)
        if not draining and lost.cause not in FINAL_CAUSES:
            engine.record_failure(attempt.breaker_period)
        if not self.limits.max_resumes or lost.cause in FINAL_CAUSES:
            return None
        self._count_loss(routed, lost, draining)
        began = time.monotonic()
        routed.queue_entry.deadline = began + (
            self.limits.capacity_seconds if self._serving() else self.limits.replacement_seconds
        )
        routed.tried_engines[:] = [engine]
        self._metrics.resumes.labels("handover" if draining else lost.cause).inc()
        try:
            new_attempt = await self._place(routed)
        except ApiError as error:
            self._metrics.resume_failures.labels("no_engine").inc()
            text = f"{lost}; no engine has taken over: {error}"
            raise StreamLost("no_engine", text) from error
        seconds = time.monotonic() - began
        self._metrics.resume_seconds.observe(seconds)
        fields = {
            "lost": engine.name,
            "cause": lost.cause,
            "engine": new_attempt.engine.name,
            "tokens": len(routed.generated),
            "seconds": round(seconds, 3),
        }
        log.info("answer resumed", extra={"fields": fields})
        return new_attempt

    def _count_loss(self, routed: RoutedRequest, lost: StreamLost, draining: bool) -> None:
        """Count a request's loss; count it as a handover instead if the request's engine was draining.

        Raises:
            StreamLost: the request was lost or handed over too often.
        """
        if draining:
            routed.handovers += 1
        else:
            routed.losses += 1
        if routed.losses > self.limits.max_resumes or routed.handovers > MAX_HANDOVERS:
            self._metrics.resume_failures.labels("too_many").inc()
            engines = routed.losses + routed.handovers
            text = f"the request was lost by {engines} engines, the last time because: {lost}"
            raise StreamLost(lost.cause, text)
