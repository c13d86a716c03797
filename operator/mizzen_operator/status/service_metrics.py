"""Series of each service that the leader looks at: groups, conditions, restarts, starts and rollouts.

They follow from what a look saw and from the status that it wrote; times come from the status, so that a
rollout keeps its age when another replica takes over. As many series as there are services, and no more: a
service that is gone takes its own with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from mizzen_operator.api.key import Key
from mizzen_operator.pods.termination_cause import cause_of
from mizzen_operator.rollout.state import Progress, recall

if TYPE_CHECKING:  # what it sees: the clients that observe count in a registry that this one is a part of
    from mizzen_operator.pods.group import Group

PREFIX = "mizzen_operator_"
START_SECONDS = (1, 2, 5, 10, 20, 30, 60, 120, 180, 300, 600, 1200, 1800, 3600)
ROLLOUT_SECONDS = (1, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
SERVICE = ("namespace", "service")
CLEAN = "Completed"
"""The node's word for a container that ended with exit code 0."""
OVERDUE = "ProgressDeadlineExceeded"
COMPLETE = ("Settled", "PartitionReached")
"""Reasons of Progressing by which a change has come to its end."""
_Conditions = Mapping[str, Mapping[str, Any]]
GROUP_STATES = ("wanted", "present", "ready", "updated", "available")


@dataclass(slots=True)
class _Service:
    """What is known of one service."""

    groups: dict[str, float]
    conditions: dict[str, bool]
    rollout_since: datetime | None = None
    overdue_since: datetime | None = None
    """When its change has got no further for as long as its spec allows."""
    oldest_start: datetime | None = None
    restarts: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """The same by cause, as far as something was wrong."""
    seen: dict[str, int] = field(default_factory=dict)
    """Restarts of each group that is there, by its pod's name."""
    started: frozenset[str] = frozenset()
    """Pods whose start has ended, well or not."""
    ended: frozenset[str] = frozenset()
    """Pods that ended by themselves."""


class Fleet:
    """Collects the series of all services; a leader feeds it, a replica that only waits shows none."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._services: dict[Key, _Service] = {}
        self._keys: dict[Key, datetime] = {}
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

    def seen(
        self,
        key: Key,
        wanted: int,
        groups: Sequence[Group],
        status: Mapping[str, Any],
        deadline: int | None = None,
        now: datetime | None = None,
    ) -> None:
        """Note a look at a service.

        Args:
            key: its name.
            wanted: groups that its spec asks for.
            groups: its engine pods.
            status: the status that the look made.
            deadline: seconds after which a change that gets no further is overdue; None where nothing of the
                spec is acted on.
            now: the time, in UTC.
        """
        now = now or datetime.now(UTC)
        conditions = {entry["type"]: entry for entry in status["conditions"]}
        before = self._services.get(key)
        service = before or _Service({}, {})
        service.groups = {
            "wanted": wanted,
            "present": status["replicas"],
            "ready": status["readyReplicas"],
            "updated": status["updatedReplicas"],
            "available": status["availableReplicas"],
        }
        service.conditions = {name: entry["status"] == "True" for name, entry in conditions.items()}
        progress = recall(status).progress
        self._rollout(service, conditions, progress, now)
        since = _stands_still_since(conditions, progress) if deadline is not None else None
        service.overdue_since = since + timedelta(seconds=deadline or 0) if since is not None else None
        self._groups(service, groups, now, first=before is None)
        self._services[key] = service

    def keys_made(self, key: Key, created: str) -> None:
        """Note when a service's keys were made: a time as Kubernetes writes it, or empty for now."""
        self._keys[key] = _time(created) if created else datetime.now(UTC)

    def forget(self, key: Key) -> None:
        """Drop the series of a service that is gone."""
        self._services.pop(key, None)
        self._keys.pop(key, None)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield the series; the registry calls it at every scrape."""
        now = datetime.now(UTC)
        services = list(self._services.items())
        groups = GaugeMetricFamily(
            f"{PREFIX}service_groups", "Groups of a service by state", labels=(*SERVICE, "state")
        )
        conditions = GaugeMetricFamily(
            f"{PREFIX}service_condition",
            "1 while a condition of a service is True",
            labels=(*SERVICE, "condition"),
        )
        for key, service in services:
            for state in GROUP_STATES:
                groups.add_metric((*key, state), service.groups[state])
            for name, true in service.conditions.items():
                conditions.add_metric((*key, name), float(true))
        restarts = CounterMetricFamily(
            f"{PREFIX}group_restarts_total",
            "Engines of a service that ended and were restarted",
            labels=SERVICE,
        )
        failures = CounterMetricFamily(
            f"{PREFIX}group_failures_total",
            "Engines of a service that failed, by cause",
            labels=(*SERVICE, "cause"),
        )
        rollout = GaugeMetricFamily(
            f"{PREFIX}rollout_age_seconds",
            "Time since the current rollout of a service began; 0 if there is none",
            labels=SERVICE,
        )
        overdue = GaugeMetricFamily(
            f"{PREFIX}rollout_overdue_seconds",
            "Time for which a rollout has made no progress beyond "
            "progressDeadlineSeconds; 0 if it is not overdue",
            labels=SERVICE,
        )
        start = GaugeMetricFamily(
            f"{PREFIX}oldest_start_seconds",
            "Time for which the oldest group that has never served has been starting; 0 if there is none",
            labels=SERVICE,
        )
        for key, service in services:
            restarts.add_metric(key, service.restarts)
            for cause, count in sorted(service.failures.items()):
                failures.add_metric((*key, cause), count)
            rollout.add_metric(key, _age(service.rollout_since, now))
            overdue.add_metric(key, _age(service.overdue_since, now))
            start.add_metric(key, _age(service.oldest_start, now))
        keys = GaugeMetricFamily(
            f"{PREFIX}keys_age_seconds",
            "Age of the keys that secure the connections between a service's gateway and engines",
            labels=SERVICE,
        )
        for key, made in list(self._keys.items()):
            keys.add_metric(key, _age(made, now))
        yield from (groups, conditions, restarts, failures, rollout, overdue, start, keys)

    def _rollout(
        self, service: _Service, conditions: _Conditions, progress: Progress | None, now: datetime
    ) -> None:
        """Follow a change: what stands still goes on trying, and what was held or left has no result."""
        progressing = conditions["Progressing"]
        if progressing["status"] == "True":
            service.rollout_since = service.rollout_since or _time(progressing["lastTransitionTime"])
            return
        if progressing["reason"] == OVERDUE:
            service.rollout_since = service.rollout_since or (progress.time if progress is not None else now)
            return
        failed = conditions["Failed"]["status"] == "True"
        if service.rollout_since is not None and (failed or progressing["reason"] in COMPLETE):
            result = "failed" if failed else "complete"
            self.rollouts.labels(result).observe(_age(service.rollout_since, now))
        service.rollout_since = None

    def _groups(self, service: _Service, groups: Sequence[Group], now: datetime, *, first: bool) -> None:
        starting: list[datetime] = []
        started: set[str] = set()
        ended = frozenset(group.name for group in groups if group.ended and not group.terminating)
        for group in groups:
            if not first:
                restarts = group.restarts - service.seen.get(group.name, 0)
                self._ends(service, group, max(0, restarts, group.name in ended - service.ended))
            created = _time(group.created) if group.created else now
            if group.routable or group.was_routable or group.ended:
                started.add(group.name)
                if not (first or group.ended or group.name in service.started):
                    self.starts.observe(_age(created, now))
            elif group.live:
                starting.append(created)
        service.ended = ended
        service.oldest_start = min(starting, default=None)
        service.seen = {group.name: group.restarts for group in groups}
        service.started = frozenset(started)

    @staticmethod
    def _ends(service: _Service, group: Group, count: int) -> None:
        service.restarts += count
        if count and group.reason and group.reason != CLEAN:
            cause = cause_of(group.reason, group.message)
            service.failures[cause] = service.failures.get(cause, 0) + count


def _stands_still_since(conditions: _Conditions, progress: Progress | None) -> datetime | None:
    """When a change that is not done got further last; None where nothing is waited for.

    A group that was lost begins such a change, too. The time that a download takes is no rollout's.
    """
    progressing = conditions["Progressing"]
    if progressing["reason"] in ("Downloading", "DownloadFailed"):
        return None
    if progressing["status"] == "True":
        began = _time(progressing["lastTransitionTime"])
        return max(began, progress.time) if progress is not None else began
    waits = conditions["Failed"]["status"] == "True" or progressing["reason"] == OVERDUE
    return progress.time if waits and progress is not None and not progress.reached else None


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _age(since: datetime | None, now: datetime) -> float:
    return max(0.0, (now - since).total_seconds()) if since is not None else 0.0
