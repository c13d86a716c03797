# SPDX-License-Identifier: Apache-2.0
"""Prometheus series of each autoscaled service: saturation, desired groups, the maximum, decisions.

The autoscaler of the leader updates them with each decision. The series of a service that is no longer
autoscaled are dropped.
"""

from __future__ import annotations

from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge

from mizzen_operator.api import reasons
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.types import Autoscaling
from mizzen_operator.autoscaling.policy import Sample, demand, recommend

PREFIX = "mizzen_operator_autoscaler_"
SERVICE_LABELS = ("namespace", "service")
_REASONS = (reasons.ABOVE_MAXIMUM, reasons.BELOW_MINIMUM, reasons.IDLE, reasons.REQUESTS_WAIT)
_METRIC_REASONS = (reasons.ABOVE_TARGET, reasons.BELOW_TARGET)
"""Endings of the reasons that begin with the metric's name."""


class ScalingMetrics:
    """The autoscaler's series; a standby exports none of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._saturation = Gauge(
            f"{PREFIX}saturation",
            "Load of an autoscaled service divided by the target of its serving groups; "
            "above 1, it needs more groups",
            SERVICE_LABELS,
            registry=registry,
        )
        self._desired = Gauge(
            f"{PREFIX}desired_groups",
            "Groups that the load of an autoscaled service needs, before limits and stabilization windows",
            SERVICE_LABELS,
            registry=registry,
        )
        self._at_maximum = Gauge(
            f"{PREFIX}at_maximum",
            "1 while an autoscaled service has spec.autoscaling.maxReplicas groups and needs more",
            SERVICE_LABELS,
            registry=registry,
        )
        self._decisions = Counter(
            f"{PREFIX}decisions_total",
            "Changes of spec.replicas by the autoscaler, by reason",
            (*SERVICE_LABELS, "reason"),
            registry=registry,
        )
        self._reasons: dict[ServiceKey, set[str]] = {}

    def update(self, key: ServiceKey, settings: Autoscaling, current: int, sample: Sample | None) -> None:
        """Update a service's gauges from one sample of its load.

        Args:
            key: the service's key.
            settings: `spec.autoscaling`.
            current: `spec.replicas`.
            sample: load of the service; None, which leaves the gauges as they are, if a gateway is silent.
        """
        if key not in self._reasons:  # PromQL's `increase()` misses the first event of a new series
            for reason in (*_REASONS, *(settings.metric + end for end in _METRIC_REASONS)):
                self._decisions.labels(*key, reason)
                self._reasons.setdefault(key, set()).add(reason)
        if sample is None:
            return
        serving = len(sample.engines)
        saturation = demand(settings, sample) / (settings.target * serving) if serving else 0.0
        desired = recommend(settings, current, sample)
        self._saturation.labels(*key).set(saturation)
        self._desired.labels(*key).set(desired)
        at_maximum = current >= settings.max_replicas and desired > settings.max_replicas
        self._at_maximum.labels(*key).set(at_maximum)

    def count_decision(self, key: ServiceKey, reason: str) -> None:
        """Count a change of a service's `spec.replicas`."""
        self._reasons.setdefault(key, set()).add(reason)
        self._decisions.labels(*key, reason).inc()

    def forget(self, key: ServiceKey) -> None:
        """Drop the series of a service."""
        for reason in self._reasons.pop(key, ()):
            self._decisions.remove(*key, reason)
        for gauge in (self._saturation, self._desired, self._at_maximum):
            with suppress(KeyError):  # without a sample, the service has no gauges
                gauge.remove(*key)
