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
from mizzen.gateway.requests.attempt import Running
from mizzen.gateway.requests.routed_request import Job
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

    resumes: int = 3
    """Engines that may be lost by one answer that has begun; 0 turns resuming off."""
    seconds: float = 60.0
    """How long an answer waits for room in the engines that serve."""
    alone_seconds: float = 1.0
    """How long it waits for a replacement when none serves."""


class Resumes:
    """Continues answers; `place` puts a job that has begun into another engine."""

    def __init__(
        self,
        limits: ResumeLimits,
        place: Callable[[Job], Awaitable[Running]],
        serving: Callable[[], bool],
        metrics: Metrics,
    ) -> None:
        self.limits = limits
        self._serving = serving
        self._place = place
        self._metrics = metrics

    async def resume(self, running: Running, lost: StreamLost) -> Running | None:
        """Return the same answer in another engine; None when it may not go on.

        Raises:
            StreamLost: it was lost too often, or there is none in time.
        """
        job, engine = running.job, running.engine
        leaving = engine.draining
        running.stream.abort()
        running.release(lost.cause)
        if not leaving and lost.cause not in FINAL_CAUSES:
            engine.failed(running.period)
        if not self.limits.resumes or lost.cause in FINAL_CAUSES:
            return None
        self._count(job, lost, leaving)
        began = time.monotonic()
        job.ticket.deadline = began + (self.limits.seconds if self._serving() else self.limits.alone_seconds)
        job.tried[:] = [engine]
        self._metrics.resumes.labels("handover" if leaving else lost.cause).inc()
        try:
            other = await self._place(job)
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
            "tokens": len(job.given),
            "seconds": round(seconds, 3),
        }
        log.info("answer resumed", extra={"fields": fields})
        return other

    def _count(self, job: Job, lost: StreamLost, leaving: bool) -> None:
        """Count a loss.

        Raises:
            StreamLost: it was one too many.
        """
        if leaving:
            job.handovers += 1
        else:
            job.losses += 1
        if job.losses > self.limits.resumes or job.handovers > MAX_HANDOVERS:
            self._metrics.resume_failures.labels("too_many").inc()
            text = (
                f"the request was lost by {job.losses + job.handovers} engines, the last time because: {lost}"
            )
            raise StreamLost(lost.cause, text)
