# SPDX-License-Identifier: Apache-2.0
"""Decides how many groups a service should have, from its load. Pure; `autoscaler.py` calls it.

Each sample recommends a number of groups. A scale-up uses the lowest recommendation within its stabilization
window; a scale-down uses the highest one within its own window. So a short peak or lull changes nothing. A
service that had no requests for `idle_to_zero` seconds is scaled to zero. As soon as a request then waits for
the service, it is scaled to one group.
Idle time counts from the moment at which an engine began to serve. While no engine serves, the service is
scaled to zero only after `wake_timeout`, the longest time that a request waits for a group to start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mizzen_operator.api import reasons
from mizzen_operator.api.types import Autoscaling

TOLERANCE = 0.1
"""Relative deviation of the metric from its target up to which the number of groups stays the same."""
MAX_GROWTH_FACTOR = 2.0
"""Maximum growth per decision: by this factor, or by MIN_GROWTH_GROUPS groups if that is more."""
MIN_GROWTH_GROUPS = 2
MAX_RECOMMENDATIONS = 1024
"""Maximum number of recommendations that are kept for the stabilization windows."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of one serving engine.

    Attributes:
        kv_percent: percentage of the KV cache's pages that requests use.
        waiting_tokens: total number of prompt tokens of the requests that wait in the engine.
        requests: number of running and waiting requests.
    """

    kv_percent: float = 0.0
    waiting_tokens: int = 0
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """Load of a service as its gateways report it.

    Attributes:
        engines: loads of the serving engines.
        queued: number of requests that wait at gateways for capacity of an engine.
        has_held_requests: whether requests wait at gateways because no engine serves.
        in_flight: number of requests in progress.
        idle_seconds: seconds since the last request at any gateway ended; 0 while a request is in progress.
    """

    engines: tuple[EngineLoad, ...] = ()
    queued: int = 0
    has_held_requests: bool = False
    in_flight: int = 0
    idle_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ScalingState:
    """State that one decision passes to the next.

    Attributes:
        recommendations: recent recommendations, the oldest first; each is its monotonic time in seconds and
            the recommended number of groups.
        had_serving_engines: whether an engine served at the last sample; None before the first sample.
        since: monotonic time in seconds at which `had_serving_engines` last changed.
    """

    recommendations: tuple[tuple[float, int], ...] = field(default=())
    had_serving_engines: bool | None = None
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Scale:
    """A change of `spec.replicas`, with the reason that the status reports."""

    before: int
    after: int
    reason: str


def decide(
    settings: Autoscaling, current: int, sample: Sample | None, state: ScalingState, now: float
) -> tuple[Scale | None, ScalingState]:
    """Decide how many groups a service should have.

    Args:
        settings: `spec.autoscaling`.
        current: `spec.replicas`.
        sample: load of the service; None if a gateway does not answer. Without a sample, only the limits are
            enforced.
        state: state after the last decision.
        now: seconds of a monotonic clock.

    Returns:
        The change, or None if the number stays the same; and the state for the next decision.
    """
    minimum = max(settings.min_replicas, 1)
    if current == 0:
        if settings.min_replicas > 0:
            return Scale(0, minimum, reasons.BELOW_MINIMUM), ScalingState()
        if sample is not None and (sample.has_held_requests or sample.queued > 0):
            return Scale(0, 1, reasons.REQUESTS_WAIT), ScalingState()
        return None, ScalingState()
    if current > settings.max_replicas:
        return Scale(current, settings.max_replicas, reasons.ABOVE_MAXIMUM), state
    if current < minimum:
        return Scale(current, minimum, reasons.BELOW_MINIMUM), state
    if sample is None:
        return None, state
    serves = bool(sample.engines)
    if serves != state.had_serving_engines:
        state = replace(state, had_serving_engines=serves, since=now)
    if _idle(settings, sample, now - state.since):
        return Scale(current, 0, reasons.IDLE), ScalingState()
    recommended = min(settings.max_replicas, max(minimum, recommend(settings, current, sample)))
    state = _add_recommendation(state, now, recommended, settings)
    after = _stabilize(state, current, settings, now)
    if after == current:
        return None, state
    metric = settings.metric
    reason = f"{metric}{reasons.ABOVE_TARGET}" if after > current else f"{metric}{reasons.BELOW_TARGET}"
    return Scale(current, after, reason), state


def recommend(settings: Autoscaling, current: int, sample: Sample) -> int:
    """Return the number of groups that would bring the metric to its target, before limits are applied.

    Groups that do not serve yet count as idle, so that the same demand is not met twice.
    """
    if not sample.engines:
        return current
    value = demand(settings, sample)
    serving = len(sample.engines)
    ratio = value / (settings.target * serving)
    if abs(ratio - 1) <= TOLERANCE:
        return current
    recommended = math.ceil(value / settings.target - 1e-9)
    if ratio > 1:
        ceiling = max(math.floor(current * MAX_GROWTH_FACTOR), current + MIN_GROWTH_GROUPS)
        return max(current, min(recommended, ceiling))
    return min(current, recommended)


def demand(settings: Autoscaling, sample: Sample) -> float:
    """Return the metric summed over groups: percent for `Saturation`, else tokens or requests."""
    if settings.metric == "QueueTokens":
        return float(sum(engine.waiting_tokens for engine in sample.engines))
    if settings.metric == "ActiveRequests":
        return float(sample.in_flight + sample.queued)
    used = sum(engine.kv_percent for engine in sample.engines)
    if sample.queued == 0:
        return used
    working = sum(engine.requests for engine in sample.engines)
    # If requests are queued, the engines are full, whatever their KV use. A queued request needs as much as
    # a running one.
    full = 100.0 * len(sample.engines)
    return max(used, full) * (1 + sample.queued / max(1, working))


def _idle(settings: Autoscaling, sample: Sample, seconds: float) -> bool:
    """Return whether a service has been idle for long enough to be scaled to zero.

    Args:
        settings: `spec.autoscaling`.
        sample: load of the service.
        seconds: time since engines began to serve, or since the last engine stopped serving.
    """
    minimum = settings.idle_to_zero
    if minimum is None or sample.has_held_requests or sample.queued or sample.in_flight:
        return False
    if any(engine.requests for engine in sample.engines):
        return False
    patience = minimum if sample.engines else max(minimum, settings.wake_timeout)
    return sample.idle_seconds >= minimum and seconds >= patience


def _add_recommendation(
    state: ScalingState, now: float, recommended: int, settings: Autoscaling
) -> ScalingState:
    oldest = now - max(settings.up_stabilization, settings.down_stabilization)
    kept = [entry for entry in state.recommendations if entry[0] >= oldest]
    recommendations = (*kept[1 - MAX_RECOMMENDATIONS :], (now, recommended))
    return replace(state, recommendations=recommendations)


def _stabilize(state: ScalingState, current: int, settings: Autoscaling, now: float) -> int:
    up = min(_since(state.recommendations, now - settings.up_stabilization))
    if up > current:
        return up
    down = max(_since(state.recommendations, now - settings.down_stabilization))
    return min(current, down)


def _since(recommendations: Sequence[tuple[float, int]], since: float) -> list[int]:
    return [recommended for at, recommended in recommendations if at >= since]
