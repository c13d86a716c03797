# SPDX-License-Identifier: Apache-2.0
"""Decisions of the autoscaler: metrics, limits, stabilization windows, and scaling to zero."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen_operator.api.types import Autoscaling
from mizzen_operator.autoscaling.policy import EngineLoad, Sample, ScalingState, decide, demand

SETTINGS = Autoscaling(
    min_replicas=1,
    max_replicas=8,
    metric="Saturation",
    target=70,
    up_stabilization=0,
    down_stabilization=300,
    idle_to_zero=None,
    wake_timeout=900,
)
TO_ZERO = replace(SETTINGS, min_replicas=0, idle_to_zero=60)


def engines(number: int, **load: float) -> tuple[EngineLoad, ...]:
    return (EngineLoad(**load),) * number  # type: ignore[arg-type]


def after(settings: Autoscaling, current: int, sample: Sample | None) -> object:
    scale, _ = decide(settings, current, sample, ScalingState(had_serving_engines=True), 1000.0)
    return None if scale is None else (scale.after, scale.reason)


@pytest.mark.parametrize(
    ("current", "sample", "expected"),
    [
        (2, Sample(engines(2, kv_percent=70)), None),
        (2, Sample(engines(2, kv_percent=76)), None),  # within the tolerance
        (2, Sample(engines(2, kv_percent=90)), (3, "SaturationAboveTarget")),
        (2, Sample(engines(2, kv_percent=20)), (1, "SaturationBelowTarget")),
        (3, Sample(engines(2, kv_percent=90)), None),  # the third engine is starting
        (2, Sample(()), None),  # no engine serves yet
        (2, None, None),
        (2, Sample(engines(2, kv_percent=50, requests=10), queued=20), (4, "SaturationAboveTarget")),
        (8, Sample(engines(8, kv_percent=100, requests=9), queued=99), None),
        (9, Sample(engines(9, kv_percent=100)), (8, "AboveMaximum")),
        (0, Sample(()), (1, "BelowMinimum")),
        (1, Sample(engines(1), idle_seconds=1e6), None),  # to zero only if the spec allows that
    ],
)
def test_the_number_of_groups_follows_the_saturation(
    current: int, sample: Sample | None, expected: object
) -> None:
    assert after(SETTINGS, current, sample) == expected


def test_the_number_of_groups_follows_the_other_metrics() -> None:
    tokens = replace(SETTINGS, metric="QueueTokens", target=1000)
    assert after(tokens, 1, Sample(engines(1, waiting_tokens=2500))) == (3, "QueueTokensAboveTarget")
    requests = replace(SETTINGS, metric="ActiveRequests", target=10)
    assert after(requests, 4, Sample(engines(4), in_flight=15)) == (2, "ActiveRequestsBelowTarget")


def test_an_idle_service_goes_to_zero_and_a_waiting_request_wakes_it() -> None:
    assert after(TO_ZERO, 1, Sample(engines(1), idle_seconds=59)) is None
    assert after(TO_ZERO, 3, Sample(engines(3), idle_seconds=60)) == (0, "Idle")
    assert after(TO_ZERO, 1, Sample(engines(1, requests=1), idle_seconds=60)) is None
    assert after(TO_ZERO, 0, Sample()) is None
    assert after(TO_ZERO, 0, None) is None
    assert after(TO_ZERO, 0, Sample(queued=1, has_held_requests=True)) == (1, "RequestsWait")


def test_the_idle_time_starts_when_a_group_serves() -> None:
    """Without requests, a group loads for 200 s, serves for the whole idle time, and is then removed."""
    state, zero = ScalingState(), None
    for now in range(0, 400, 5):
        sample = Sample(engines(1) if now >= 200 else (), idle_seconds=1000.0 + now)
        scale, state = decide(TO_ZERO, 1, sample, state, float(now))
        if scale is not None:
            zero = (now, scale.after, scale.reason)
            break
    assert zero == (260, 0, "Idle")


def test_a_group_that_never_serves_is_removed_after_the_wake_timeout() -> None:
    state = ScalingState()
    for now, expected in ((0.0, None), (899.0, None), (900.0, "Idle")):
        scale, state = decide(TO_ZERO, 1, Sample(idle_seconds=1000.0), state, now)
        assert (None if scale is None else scale.reason) == expected


def test_peaks_and_lulls_within_the_stabilization_window_have_no_effect() -> None:
    slow = replace(SETTINGS, up_stabilization=30)
    state, current = ScalingState(), 4
    for now, percent, expected in (
        (0.0, 70, None),
        (15.0, 100, None),
        (29.0, 100, None),
        (46.0, 100, 6),
    ):
        scale, state = decide(slow, current, Sample(engines(4, kv_percent=percent)), state, now)
        assert (None if scale is None else scale.after) == expected
    state, current = ScalingState(), 4
    for now, percent, expected in (
        (0.0, 70, None),
        (100.0, 10, None),
        (299.0, 10, None),
        (301.0, 10, 1),
    ):
        scale, state = decide(SETTINGS, current, Sample(engines(4, kv_percent=percent)), state, now)
        assert (None if scale is None else scale.after) == expected


settings = st.builds(
    lambda low, more, metric, target, up, down, idle: Autoscaling(
        min_replicas=0 if idle is not None else max(1, low),
        max_replicas=max(1, low) + more,
        metric=metric,
        target=target,
        up_stabilization=up,
        down_stabilization=down,
        idle_to_zero=idle,
        wake_timeout=900,
    ),
    st.integers(0, 5),
    st.integers(0, 20),
    st.sampled_from(["Saturation", "QueueTokens", "ActiveRequests"]),
    st.integers(1, 100),
    st.integers(0, 60),
    st.integers(0, 600),
    st.none() | st.integers(1, 600),
)
loads = st.builds(EngineLoad, st.floats(0, 100), st.integers(0, 10**7), st.integers(0, 500))
samples = st.builds(
    Sample,
    st.lists(loads, max_size=12).map(tuple),
    st.integers(0, 1000),
    st.booleans(),
    st.integers(0, 1000),
    st.floats(0, 1000),
)


@given(settings, st.integers(0, 30), st.lists(st.tuples(st.none() | samples, st.floats(0, 120)), max_size=20))
def test_decisions_stay_within_the_limits_and_have_a_reason(
    chosen: Autoscaling, current: int, steps: list[tuple[Sample | None, float]]
) -> None:
    state, now = ScalingState(), 0.0
    for sample, pause in steps:
        now += pause
        scale, state = decide(chosen, current, sample, state, now)
        if scale is None:
            continue
        assert scale.before == current != scale.after
        assert scale.reason
        least = 0 if scale.reason == "Idle" else max(1, chosen.min_replicas)
        assert least <= scale.after <= chosen.max_replicas
        if scale.after == 0:
            assert sample is not None and not (sample.has_held_requests or sample.queued or sample.in_flight)
        if scale.after > current > 0 and scale.reason.endswith("AboveTarget"):
            assert sample is not None
            assert demand(chosen, sample) > chosen.target * len(sample.engines)
        current = scale.after


@given(settings, st.integers(1, 12), st.floats(0, 99), st.integers(0, 200))
def test_under_a_steady_load_decisions_converge(
    chosen: Autoscaling, groups: int, percent: float, requests: int
) -> None:
    """If the total work stays constant, the number of groups does not oscillate."""
    steady = replace(chosen, up_stabilization=0, down_stabilization=0, idle_to_zero=None)
    steady = replace(steady, min_replicas=max(1, steady.min_replicas))
    total, state, current = percent * groups, ScalingState(), groups
    sizes: list[int] = []
    for step in range(40):
        share = EngineLoad(min(100.0, total / current), int(total), requests // current)
        sample = Sample((share,) * current, 0, False, requests, 0.0)
        scale, state = decide(steady, current, sample, state, float(step))
        if scale is None:
            break
        current = scale.after
        sizes.append(current)
    else:
        pytest.fail(f"the number of groups oscillates: {sizes}")
