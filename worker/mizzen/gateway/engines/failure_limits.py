# SPDX-License-Identifier: Apache-2.0
"""Limits for failing engines, from the configuration, and the gauges that report engine failures."""

from __future__ import annotations

from collections.abc import Iterable

from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.engines.circuit_breaker import BreakerLimits
from mizzen.gateway.engines.engine_table import EngineTable
from mizzen.gateway.routing.resume import ResumeLimits
from mizzen.gateway.routing.warmup import WarmLimits
from mizzen.gateway.telemetry.metrics import Metrics


def breaker_limits(config: GatewayConfig) -> BreakerLimits:
    """Return the limits of the engines' circuit breakers."""
    return BreakerLimits(failures=config.breaker_failures, max_seconds=config.breaker_max_seconds)


def resume_limits(config: GatewayConfig) -> ResumeLimits:
    """Return the limits for resuming answers."""
    return ResumeLimits(
        max_resumes=config.max_resumes,
        capacity_seconds=config.resume_timeout_seconds,
        replacement_seconds=config.resume_wait_seconds,
    )


def warm_limits(config: GatewayConfig) -> WarmLimits:
    """Return the limits for warming new engines."""
    return WarmLimits(tokens=config.warm_tokens, seconds=config.warm_seconds)


def publish_engine_gauges(metrics: Metrics, tables: Iterable[EngineTable], waiting: int) -> None:
    """Set the gauges of circuit breakers, prefix index, suspect engines and waiting requests.

    `waiting` is the number of requests that wait because no engine of their service serves.
    """
    metrics.breaker.clear()
    metrics.breaker_opened.clear()
    blocks = forgotten = suspects = 0
    for engine in (engine for table in tables for engine in table):
        metrics.breaker.labels(engine.name).set(int(engine.breaker.state))
        metrics.breaker_opened.labels(engine.name).set(engine.breaker.open_count)
        blocks += len(engine.prefixes)
        forgotten += engine.prefixes.evicted_blocks
        images = engine.link.image_counts.take()
        metrics.images_requested.inc(images.requested)
        metrics.images_sent.inc(images.sent)
        metrics.image_bytes.inc(images.sent_bytes)
        suspects += engine.suspect
    metrics.prefix_blocks.set(blocks)
    metrics.prefix_forgotten.set(forgotten)
    metrics.suspects.set(suspects)
    metrics.waiting.set(waiting)
