# SPDX-License-Identifier: Apache-2.0
"""Prometheus series of each service: groups, conditions, restarts, rollouts, downloads and keys.

The status writer of the leader updates them after each reconcile. Times come from the status, so the age of
a rollout stays correct when another replica becomes leader. The series of a deleted service are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from mizzen_operator.api import reasons
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.pods.group import Group
from mizzen_operator.pods.termination_cause import classify_termination
from mizzen_operator.rollout.state import RolloutProgress, load_state

PREFIX = "mizzen_operator_"
START_SECONDS = (1, 2, 5, 10, 20, 30, 60, 120, 180, 300, 600, 1200, 1800, 3600)
ROLLOUT_SECONDS = (1, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
SERVICE_LABELS = ("namespace", "service")
COMPLETE_REASONS = (reasons.SETTLED, reasons.PARTITION_REACHED)
"""Reasons of Progressing that mean that a rollout is complete."""
GROUP_STATES = ("wanted", "present", "ready", "updated", "available")
_Conditions = Mapping[str, Mapping[str, Any]]


@dataclass(slots=True)
class _ServiceSeries:
    """Values of one service's series.

    Attributes:
        groups: number of groups, by state.
        conditions: whether each condition is True, by type.
        rollout_since: start of the current rollout; None if no rollout is in progress.
        overdue_since: time at which the current rollout exceeded, or will exceed, its progress deadline; None
            if no rollout is in progress.
        avoided_nodes: number of nodes that new groups avoid.
        oldest_start: start of the oldest group that has never served; None if there is no such group.
        created: creation times of the existing groups by our clock, by name.
        restarts: number of engine restarts that this process has observed.
        failures: number of engine failures that this process has observed, by cause.
        group_restarts: restart counts of the existing groups at the last update, by name.
        started: names of the existing groups that have finished starting, successfully or not.
        ended: names of the existing groups that have ended without being deleted.
        model_bytes: bytes of the model in the cache, and its size; None if the operator does not download it.
    """

    groups: dict[str, float]
    conditions: dict[str, bool]
    rollout_since: datetime | None = None
    overdue_since: datetime | None = None
    avoided_nodes: int = 0
    oldest_start: datetime | None = None
    restarts: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    group_restarts: dict[str, int] = field(default_factory=dict)
    started: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()
    created: dict[str, datetime] = field(default_factory=dict)
    model_bytes: tuple[int, int] | None = None


class ServiceMetrics:
    """The series of all services; a standby exports none of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._services: dict[ServiceKey, _ServiceSeries] = {}
        self._keys: dict[ServiceKey, datetime] = {}
        self.starts = Histogram(
            f"{PREFIX}group_start_seconds",
            "Duration of cold starts, from a group's creation until requests are routed to it",
            buckets=START_SECONDS,
            registry=registry,
        )
        self.rollouts = Histogram(
            f"{PREFIX}rollout_duration_seconds",
            "Time from a change of a service until its rollout completed or failed",
            ["result"],
            buckets=ROLLOUT_SECONDS,
            registry=registry,
        )
        for result in ("complete", "failed"):
            self.rollouts.labels(result)
        registry.register(self)  # pyright: ignore[reportArgumentType]

    def update(
        self,
        key: ServiceKey,
        *,
        wanted: int,
        groups: Sequence[Group],
        status: Mapping[str, Any],
        deadline: int | None = None,
        now: datetime | None = None,
    ) -> None:
        """Update the series of one service after a reconcile.

        Args:
            key: the service's key.
            wanted: number of groups wanted.
            groups: the service's groups.
            status: the status that the reconcile built.
            deadline: seconds without progress after which a rollout is overdue; None in degraded mode.
            now: the time, in UTC; None for the current time.
        """
        now = now or datetime.now(UTC)
        conditions = {entry["type"]: entry for entry in status["conditions"]}
        existing = self._services.get(key)
        service = existing or _ServiceSeries({}, {})
        service.groups = {
            "wanted": wanted,
            "present": status["replicas"],
            "ready": status["readyReplicas"],
            "updated": status["updatedReplicas"],
            "available": status["availableReplicas"],
        }
        service.conditions = {name: entry["status"] == "True" for name, entry in conditions.items()}
        service.avoided_nodes = len(status.get("avoidedNodes", ()))
        progress = load_state(status).progress
        self._update_rollout(service, conditions, progress, now)
        since = _last_progress(conditions, progress) if deadline is not None else None
        service.overdue_since = since + timedelta(seconds=deadline or 0) if since is not None else None
        self._update_groups(service, groups, now, first=existing is None)
        model = status.get("model", {})
        counts = (model.get("fetchedBytes", 0), model.get("totalBytes", 0)) if "totalBytes" in model else None
        service.model_bytes = counts
        self._services[key] = service

    def record_keys_created(self, key: ServiceKey, created: str) -> None:
        """Record that a service's keys were created at `created`, a Kubernetes timestamp; now if empty."""
        self._keys[key] = _parse_time(created) if created else datetime.now(UTC)

    def forget(self, key: ServiceKey) -> None:
        """Drop the series of a deleted service."""
        self._services.pop(key, None)
        self._keys.pop(key, None)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield the series; the registry calls this at every scrape."""
        now = datetime.now(UTC)
        services = list(self._services.items())
        groups = GaugeMetricFamily(
            f"{PREFIX}service_groups", "Groups of a service, by state", labels=(*SERVICE_LABELS, "state")
        )
        conditions = GaugeMetricFamily(
            f"{PREFIX}service_condition",
            "1 while a condition of a service is True",
            labels=(*SERVICE_LABELS, "condition"),
        )
        for key, service in services:
            for state in GROUP_STATES:
                groups.add_metric((*key, state), service.groups[state])
            for name, true in service.conditions.items():
                conditions.add_metric((*key, name), float(true))
        restarts = CounterMetricFamily(
            f"{PREFIX}group_restarts_total",
            "Number of times that an engine of a service was restarted after it ended",
            labels=SERVICE_LABELS,
        )
        failures = CounterMetricFamily(
            f"{PREFIX}group_failures_total",
            "Failures of engines of a service, by cause",
            labels=(*SERVICE_LABELS, "cause"),
        )
        rollout = GaugeMetricFamily(
            f"{PREFIX}rollout_age_seconds",
            "Time since the current rollout of a service began; 0 without a rollout",
            labels=SERVICE_LABELS,
        )
        overdue = GaugeMetricFamily(
            f"{PREFIX}rollout_overdue_seconds",
            "Time by which a rollout without progress exceeds progressDeadlineSeconds; "
            "0 if it is not overdue",
            labels=SERVICE_LABELS,
        )
        start = GaugeMetricFamily(
            f"{PREFIX}oldest_start_seconds",
            "Age of the oldest starting group that has never served; 0 without such a group",
            labels=SERVICE_LABELS,
        )
        avoided = GaugeMetricFamily(
            f"{PREFIX}avoided_nodes",
            "Nodes that new groups of a service avoid, because engines lost their GPU there repeatedly",
            labels=SERVICE_LABELS,
        )
        for key, service in services:
            avoided.add_metric(key, service.avoided_nodes)
            restarts.add_metric(key, service.restarts)
            for cause, count in sorted(service.failures.items()):
                failures.add_metric((*key, cause), count)
            rollout.add_metric(key, _age(service.rollout_since, now))
            overdue.add_metric(key, _age(service.overdue_since, now))
            start.add_metric(key, _age(service.oldest_start, now))
        keys = GaugeMetricFamily(
            f"{PREFIX}keys_age_seconds",
            "Age of the keys that secure the connections between a service's gateway and engines",
            labels=SERVICE_LABELS,
        )
        for key, created in list(self._keys.items()):
            keys.add_metric(key, _age(created, now))
        yield from (groups, conditions, restarts, failures, rollout, overdue, avoided, start, keys)
        yield from _collect_downloads(services)

    def _update_rollout(
        self,
        service: _ServiceSeries,
        conditions: _Conditions,
        progress: RolloutProgress | None,
        now: datetime,
    ) -> None:
        """Update the start of the rollout, and record its duration when it ends.

        A rollout that has exceeded its deadline still counts as in progress. No duration is recorded for a
        rollout that is paused, or that ends because the service is being deleted.
        """
        progressing = conditions[reasons.PROGRESSING]
        if progressing["status"] == "True":
            service.rollout_since = service.rollout_since or _parse_time(progressing["lastTransitionTime"])
            return
        if progressing["reason"] == reasons.PROGRESS_DEADLINE_EXCEEDED:
            service.rollout_since = service.rollout_since or (progress.time if progress is not None else now)
            return
        failed = conditions[reasons.FAILED]["status"] == "True"
        if service.rollout_since is not None and (failed or progressing["reason"] in COMPLETE_REASONS):
            result = "failed" if failed else "complete"
            self.rollouts.labels(result).observe(_age(service.rollout_since, now))
        service.rollout_since = None

    def _update_groups(
        self, service: _ServiceSeries, groups: Sequence[Group], now: datetime, *, first: bool
    ) -> None:
        """Update restarts and start times; at the `first` update, ignore what happened before it."""
        starting: list[datetime] = []
        started: set[str] = set()
        ended = frozenset(group.name for group in groups if group.ended and not group.terminating)
        created_times = {
            group.name: service.created.get(group.name) or _creation_time(group, now, known=first)
            for group in groups
        }
        for group in groups:
            if not first:
                restarts = group.restarts - service.group_restarts.get(group.name, 0)
                newly_ended = group.name in ended - service.ended
                self._count_restarts(service, group, max(0, restarts, newly_ended))
            created = created_times[group.name]
            if group.routable or group.was_routable or group.ended:
                started.add(group.name)
                if not (first or group.ended or group.name in service.started):
                    self.starts.observe(_age(created, now))
            elif group.live:
                starting.append(created)
        service.ended, service.created = ended, created_times
        service.oldest_start = min(starting, default=None)
        service.group_restarts = {group.name: group.restarts for group in groups}
        service.started = frozenset(started)

    @staticmethod
    def _count_restarts(service: _ServiceSeries, group: Group, count: int) -> None:
        """Add restarts of a group; each counts as a failure too, unless the container exited with code 0."""
        service.restarts += count
        if count and group.reason and group.reason != reasons.COMPLETED:
            cause = classify_termination(group.reason, group.message)
            service.failures[cause] = service.failures.get(cause, 0) + count


def _collect_downloads(services: Sequence[tuple[ServiceKey, _ServiceSeries]]) -> Iterator[GaugeMetricFamily]:
    """Yield the series of the models that the operator downloads into a cache."""
    fetched = GaugeMetricFamily(
        f"{PREFIX}model_fetched_bytes", "Bytes of a service's model in its cache", labels=SERVICE_LABELS
    )
    total = GaugeMetricFamily(
        f"{PREFIX}model_total_bytes",
        "Size of a service's model, which is downloaded into a cache; 0 while it is unknown",
        labels=SERVICE_LABELS,
    )
    for key, service in services:
        if service.model_bytes is not None:
            fetched.add_metric(key, service.model_bytes[0])
            total.add_metric(key, service.model_bytes[1])
    yield from (fetched, total)


def _last_progress(conditions: _Conditions, progress: RolloutProgress | None) -> datetime | None:
    """Return the time of the last progress of an incomplete rollout; None if no rollout is in progress.

    The replacement of a lost group counts as a rollout; a download of the model does not.
    """
    progressing = conditions[reasons.PROGRESSING]
    if progressing["reason"] in (reasons.DOWNLOADING, reasons.DOWNLOAD_FAILED):
        return None
    if progressing["status"] == "True":
        began = _parse_time(progressing["lastTransitionTime"])
        return max(began, progress.time) if progress is not None else began
    failed = conditions[reasons.FAILED]["status"] == "True"
    stalled = failed or progressing["reason"] == reasons.PROGRESS_DEADLINE_EXCEEDED
    return progress.time if stalled and progress is not None and not progress.complete else None


def _creation_time(group: Group, now: datetime, *, known: bool) -> datetime:
    """Return the time by our clock at which a group was created.

    The API server's clock may differ from ours. Its time is used only for a group that is older than this
    process; it is then the best estimate.

    Args:
        group: a group that is seen for the first time.
        now: the time, in UTC.
        known: whether the group existed when this process first saw the service.
    """
    seen = now - timedelta(seconds=group.age)
    return min(seen, _parse_time(group.created)) if known and group.created else seen


def _parse_time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _age(since: datetime | None, now: datetime) -> float:
    return max(0.0, (now - since).total_seconds()) if since is not None else 0.0
