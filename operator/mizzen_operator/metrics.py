# SPDX-License-Identifier: Apache-2.0
"""Metrics of the operator's process. `status/service_metrics.py` adds the series per service."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from mizzen_operator.config import VERSION

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The operator's metrics, one attribute each; their exposed names begin with `mizzen_operator_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Histogram(
            "mizzen_operator_reconcile_duration_seconds",
            "Duration of a reconcile pass over one service",
            ["result"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.errors = self._counter("reconcile_errors_total", "Failed reconcile passes, by reason", "reason")
        self.actions = self._counter(
            "actions_total", "Changes made to the cluster, by kind of change", "action"
        )
        self.api_requests = self._counter(
            "api_requests_total", "Requests to the API server", "verb", "kind", "code"
        )
        self.gateway_queries = self._counter(
            "gateway_queries_total", "Requests to the admin APIs of gateways, by result", "result"
        )
        self.verifications = self._counter(
            "verifications_total", "Verifications of groups with golden prompts, by result", "result"
        )
        self.queue_depth = self._gauge("workqueue_depth", "Services waiting in the work queue")
        self.queue_age = self._gauge(
            "workqueue_age_seconds", "Time that the first service in the work queue has waited"
        )
        self.leader = self._gauge("leader", "1 while this replica is the leader")
        self.watch_age = self._gauge(
            "watch_last_success_seconds", "Time since the API server last answered a watch", "kind"
        )
        self.watch_event_age = self._gauge(
            "watch_last_event_seconds",
            "Time since a watch last delivered an event or was answered",
            "kind",
        )
        self.services = self._gauge("services", "Services for which the condition is True", "condition")
        self.api_seconds = Histogram(
            "mizzen_operator_api_request_duration_seconds",
            "Duration of requests to the API server",
            ["verb"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._gauge("build_info", "Always 1; the label holds the version", "version").labels(VERSION).set(1)
        ProcessCollector(registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"mizzen_operator_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"mizzen_operator_{name}", text, labels, registry=self.registry)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format, as UTF-8."""
        return generate_latest(self.registry)
