# SPDX-License-Identifier: Apache-2.0
"""Usage by API key: the number of series is bounded, no request is lost, and no counter falls."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from mizzen.gateway.telemetry.fast_metrics import OTHER_LABEL
from mizzen.gateway.telemetry.key_usage import MAX_KEYS, REVIEW_REQUESTS, KeyUsage


def registered() -> tuple[KeyUsage, CollectorRegistry]:
    registry, usage = CollectorRegistry(), KeyUsage("x_")
    registry.register(usage)  # type: ignore[arg-type]
    return usage, registry


def series(registry: CollectorRegistry) -> dict[str, float]:
    return {
        sample.labels["key"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "x_key_requests_total"
    }


def test_requests_and_tokens_are_counted_by_key() -> None:
    usage, registry = registered()
    usage.count("team-a", 10, 5)
    usage.count("team-a", 1, 2)
    usage.count("batch", 100, 0)
    assert series(registry) == {"team-a": 2, "batch": 1, OTHER_LABEL: 0}
    tokens = [
        registry.get_sample_value("x_key_tokens_total", {"key": "team-a", "type": kind})
        for kind in ("prompt", "output")
    ]
    assert tokens == [11, 7]


def test_a_busy_key_takes_the_place_of_an_idle_one() -> None:
    usage, registry = registered()
    for number in range(MAX_KEYS):
        usage.count(f"idle-{number}", 1, 1)
    for _ in range(2 * REVIEW_REQUESTS):
        usage.count("late", 1, 1)
    shown = series(registry)
    assert len(shown) == MAX_KEYS + 1
    assert shown["late"] > 0
    assert "idle-0" in shown or "idle-1" in shown


def test_a_key_called_other_has_no_series_of_its_own() -> None:
    usage, registry = registered()
    usage.count(OTHER_LABEL, 1, 1)
    assert series(registry) == {OTHER_LABEL: 1}


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3 * MAX_KEYS), st.integers(1, 4 * REVIEW_REQUESTS), st.randoms(use_true_random=False))
def test_series_are_bounded_and_counters_never_fall(keys: int, requests: int, draw: object) -> None:
    usage, registry = registered()
    before: dict[str, float] = {}
    for number in range(requests):
        usage.count(f"key-{int(keys * draw.random() ** 2)}", 1, 1)  # type: ignore[attr-defined]
        if number % 500 == 499:
            shown = series(registry)
            assert len(shown) <= MAX_KEYS + 1
            assert shown[OTHER_LABEL] >= before.get(OTHER_LABEL, 0.0)
            before = shown
    if keys <= MAX_KEYS:
        assert sum(series(registry).values()) == requests
