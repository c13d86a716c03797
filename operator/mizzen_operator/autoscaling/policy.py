"""How many groups a service should have, by how busy it is: pure.

Each sample recommends a number. Up is scaled to the lowest recommendation within the window for it, down to
the highest within its own, so that neither a short peak nor a short lull moves anything. To zero goes what
nobody has asked for `idle_to_zero` seconds; from zero comes one group as soon as a request waits. What has
only just come has not been idle: a group that loads is left to serve first, unless that takes longer than any
request waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mizzen_operator.api.types import Autoscaling

TOLERANCE = 0.1
"""A metric this close to its target moves nothing."""
MOST_GROWTH = 2.0
"""A service grows at most so many times, or by `LEAST_GROWTH` groups, in one decision."""
LEAST_GROWTH = 2
MOST_RECOMMENDATIONS = 1024


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One serving engine.

    Attributes:
        kv_percent: pages that requests use, of all.
        waiting_tokens: prompt tokens that wait there.
        requests: in work or waiting there.
    """

    kv_percent: float = 0.0
    waiting_tokens: int = 0
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """What the gateways say of a service.

    Attributes:
        engines: that serve.
        queued: requests that wait at gateways for room in an engine.
        held: requests wait, and no engine serves.
        in_flight: requests in work.
        idle_seconds: since the last request left any gateway; 0 while there is one.
    """

    engines: tuple[EngineLoad, ...] = ()
    queued: int = 0
    held: bool = False
    in_flight: int = 0
    idle_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """What one decision leaves to the next.

    Attributes:
        recommended: recommendations with their times, the oldest first.
        served: whether an engine served at the last sample; None before the first.
        since: when that began, as far as it was seen.
    """

    recommended: tuple[tuple[float, int], ...] = field(default=())
    served: bool | None = None
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Scale:
    """A change of `spec.replicas`."""

    before: int
    after: int
    reason: str


def decide(
    settings: Autoscaling, current: int, sample: Sample | None, memory: Memory, now: float
) -> tuple[Scale | None, Memory]:
    """Decide on a number of groups.

    Args:
        settings: `spec.autoscaling`.
        current: `spec.replicas`.
        sample: None when no gateway answers: then nothing is decided but the limits.
        memory: as the last decision left it.
        now: seconds of any clock that never goes back.

    Returns:
        The change, None when there is none; and what to remember.
    """
    least = max(settings.min_replicas, 1)
    if current == 0:
        if settings.min_replicas > 0:
            return Scale(0, least, "BelowMinimum"), Memory()
        if sample is not None and (sample.held or sample.queued > 0):
            return Scale(0, 1, "RequestsWait"), Memory()
        return None, Memory()
    if current > settings.max_replicas:
        return Scale(current, settings.max_replicas, "AboveMaximum"), memory
    if current < least:
        return Scale(current, least, "BelowMinimum"), memory
    if sample is None:
        return None, memory
    serves = bool(sample.engines)
    if serves != memory.served:
        memory = replace(memory, served=serves, since=now)
    if _idle(settings, sample, now - memory.since):
        return Scale(current, 0, "Idle"), Memory()
    wanted = min(settings.max_replicas, max(least, recommend(settings, current, sample)))
    memory = _remember(memory, now, wanted, settings)
    after = _stabilized(memory, current, settings, now)
    if after == current:
        return None, memory
    metric = settings.metric
    reason = f"{metric}AboveTarget" if after > current else f"{metric}BelowTarget"
    return Scale(current, after, reason), memory


def recommend(settings: Autoscaling, current: int, sample: Sample) -> int:
    """The number of groups that would bring the metric to its target; limits aside.

    Groups that do not serve yet count as idle: what was just asked for is not asked for again.
    """
    if not sample.engines:
        return current
    value = demand(settings, sample)
    serving = len(sample.engines)
    ratio = value / (settings.target * serving)
    if abs(ratio - 1) <= TOLERANCE:
        return current
    wanted = math.ceil(value / settings.target - 1e-9)
    if ratio > 1:
        ceiling = max(math.floor(current * MOST_GROWTH), current + LEAST_GROWTH)
        return max(current, min(wanted, ceiling))
    return min(current, wanted)


def demand(settings: Autoscaling, sample: Sample) -> float:
    """The metric summed over groups: percent for `Saturation`, else tokens or requests."""
    if settings.metric == "QueueTokens":
        return float(sum(engine.waiting_tokens for engine in sample.engines))
    if settings.metric == "ActiveRequests":
        return float(sample.in_flight + sample.queued)
    used = sum(engine.kv_percent for engine in sample.engines)
    if sample.queued == 0:
        return used
    working = sum(engine.requests for engine in sample.engines)
    # A queue means that the engines are full, whatever their KV use: it wants as much as the others have.
    full = 100.0 * len(sample.engines)
    return max(used, full) * (1 + sample.queued / max(1, working))


def _idle(settings: Autoscaling, sample: Sample, seconds: float) -> bool:
    """Whether nobody asks, for long enough, of what serves or does not serve for so many seconds."""
    least = settings.idle_to_zero
    if least is None or sample.held or sample.queued or sample.in_flight:
        return False
    if any(engine.requests for engine in sample.engines):
        return False
    patience = least if sample.engines else max(least, settings.wake_timeout)
    return sample.idle_seconds >= least and seconds >= patience


def _remember(memory: Memory, now: float, wanted: int, settings: Autoscaling) -> Memory:
    oldest = now - max(settings.up_stabilization, settings.down_stabilization)
    kept = [entry for entry in memory.recommended if entry[0] >= oldest]
    recommended = (*kept[1 - MOST_RECOMMENDATIONS :], (now, wanted))
    return replace(memory, recommended=recommended)


def _stabilized(memory: Memory, current: int, settings: Autoscaling, now: float) -> int:
    up = min(_within(memory.recommended, now - settings.up_stabilization))
    if up > current:
        return up
    down = max(_within(memory.recommended, now - settings.down_stabilization))
    return min(current, down)


def _within(recommended: Sequence[tuple[float, int]], since: float) -> list[int]:
    return [wanted for at, wanted in recommended if at >= since]
