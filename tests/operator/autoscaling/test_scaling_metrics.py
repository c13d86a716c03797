# SPDX-License-Identifier: Apache-2.0
"""Series of the autoscaler: saturation, desired groups, the maximum and decisions."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.types import Autoscaling
from mizzen_operator.autoscaling.policy import EngineLoad, Sample
from mizzen_operator.autoscaling.scaling_metrics import ScalingMetrics

KEY = ServiceKey("llm", "demo")
LABELS = {"namespace": "llm", "service": "demo"}
SETTINGS = Autoscaling(1, 2, "ActiveRequests", 10, 0, 300, None, 900)


def load(requests: int, engines: int = 2) -> Sample:
    return Sample(engines=(EngineLoad(),) * engines, in_flight=requests)


@pytest.mark.parametrize(
    ("replicas", "sample", "saturation", "desired", "at_maximum"),
    [
        (2, load(20), 1.0, 2, 0),
        (2, load(35), 1.75, 4, 1),
        (1, load(25, 1), 2.5, 3, 0),
        (2, load(4), 0.2, 1, 0),
        (2, load(0, 0), 0.0, 2, 0),
    ],
)
def test_gauges_show_how_the_load_compares_with_the_target_and_the_maximum(
    replicas: int, sample: Sample, saturation: float, desired: int, at_maximum: int
) -> None:
    registry = CollectorRegistry()
    ScalingMetrics(registry).update(KEY, SETTINGS, replicas, sample)
    shown = [
        registry.get_sample_value(f"mizzen_operator_autoscaler_{name}", LABELS)
        for name in ("saturation", "desired_groups", "at_maximum")
    ]
    assert shown == [saturation, desired, at_maximum]


def test_a_missing_sample_changes_nothing_and_forgotten_services_have_no_series() -> None:
    registry = CollectorRegistry()
    metrics = ScalingMetrics(registry)
    metrics.forget(KEY)
    metrics.update(KEY, SETTINGS, 2, None)
    for reason in ("AboveMaximum", "BelowMinimum", "Idle", "RequestsWait", "ActiveRequestsAboveTarget"):
        start = registry.get_sample_value(
            "mizzen_operator_autoscaler_decisions_total", {**LABELS, "reason": reason}
        )
        assert start == 0, "increase() of PromQL needs a series before its first event"
    assert registry.get_sample_value("mizzen_operator_autoscaler_at_maximum", LABELS) is None
    metrics.update(KEY, SETTINGS, 2, load(35))
    metrics.update(KEY, SETTINGS, 2, None)
    metrics.count_decision(KEY, "Idle")
    decisions = {**LABELS, "reason": "Idle"}
    assert registry.get_sample_value("mizzen_operator_autoscaler_at_maximum", LABELS) == 1
    assert registry.get_sample_value("mizzen_operator_autoscaler_decisions_total", decisions) == 1
    metrics.forget(KEY)
    assert registry.get_sample_value("mizzen_operator_autoscaler_at_maximum", LABELS) is None
    assert registry.get_sample_value("mizzen_operator_autoscaler_decisions_total", decisions) is None
