# SPDX-License-Identifier: Apache-2.0
"""Startup timings of a group: reads them from its pods' status, and builds `status.coldStart`. Pure.

`pods/group.py` reads the timings of every group. When the gateways first route to a group, the reconciler
reports its timings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.kube.objects import timestamp
from mizzen_operator.pods.container_state import engine_containers


@dataclass(frozen=True, slots=True)
class StartupTimings:
    """Times at which a pod, or a whole group, passed the stages of its start.

    A stage that the pod has not passed yet has no time (None).

    Attributes:
        created: time at which the pod was created.
        scheduled: time at which the pod was bound to a node.
        fetch_duration: time that the init container took to fetch the model; zero without one.
        engine_started: time at which the engine's container was last started.
        ready: time at which the engine became ready.
    """

    created: datetime | None = None
    scheduled: datetime | None = None
    fetch_duration: timedelta = timedelta()
    engine_started: datetime | None = None
    ready: datetime | None = None


NOT_STARTED = StartupTimings()


def read_startup_timings(pod: Mapping[str, Any]) -> StartupTimings:
    """Read the startup timings of an engine pod."""
    status = pod.get("status", {})
    true = {entry["type"]: entry for entry in status.get("conditions", []) if entry.get("status") == "True"}
    engines = engine_containers(status.get("containerStatuses", []))
    running = [engine.get("state", {}).get("running") or {} for engine in engines]
    init_containers = status.get("initContainerStatuses", [])
    fetches = [
        container.get("state", {}).get("terminated") or {}
        for container in init_containers
        if container.get("name") == labels.FETCH
    ]
    return StartupTimings(
        created=_parse_time(pod["metadata"], "creationTimestamp"),
        scheduled=_parse_time(true.get("PodScheduled", {}), "lastTransitionTime"),
        fetch_duration=sum(map(_duration, fetches), timedelta()),
        engine_started=max(
            filter(None, (_parse_time(state, "startedAt") for state in running)), default=None
        ),
        ready=_parse_time(true.get("ContainersReady", {}), "lastTransitionTime"),
    )


def merge_startup_timings(timings: Sequence[StartupTimings]) -> StartupTimings:
    """Merge the timings of a group's pods; the group passes a stage when its last pod passes it."""

    def last(times: Sequence[datetime | None]) -> datetime | None:
        reached = [time for time in times if time is not None]
        return max(reached) if len(reached) == len(times) else None

    return StartupTimings(
        created=min(filter(None, (pod.created for pod in timings)), default=None),
        scheduled=last([pod.scheduled for pod in timings]),
        fetch_duration=max((pod.fetch_duration for pod in timings), default=timedelta()),
        engine_started=last([pod.engine_started for pod in timings]),
        ready=last([pod.ready for pod in timings]),
    )


def cold_start_entry(name: str, timings: StartupTimings, now: datetime) -> dict[str, Any]:
    """Return `status.coldStart` for a group that all gateways have just begun to route to.

    Clocks of the scheduler, node and operator may differ. Still, no stage has a negative duration, and the
    durations of all stages add up to the total.

    Args:
        name: the group's name.
        timings: the group's timings; a stage whose time is missing takes zero seconds.
        now: time at which the gateways began to route to the group, in UTC; truncated to seconds.
    """
    end = now.replace(microsecond=0)
    points = [min(timings.created or end, end)]
    for time in (timings.scheduled, timings.engine_started, timings.ready, end):
        points.append(min(end, max(points[-1], time or points[-1])))
    pending, begin, load, warmup = (
        round((after - before).total_seconds()) for before, after in pairwise(points)
    )
    download = min(begin, round(timings.fetch_duration.total_seconds()))
    return {
        "group": name,
        "time": timestamp(end),
        "pendingSeconds": pending,
        "imagePullSeconds": begin - download,
        "downloadSeconds": download,
        "loadSeconds": load,
        "warmupSeconds": warmup,
        "firstReadySeconds": pending + begin + load + warmup,
    }


def _parse_time(entry: Mapping[str, Any], name: str) -> datetime | None:
    return datetime.fromisoformat(entry[name]) if entry.get(name) else None


def _duration(terminated: Mapping[str, Any]) -> timedelta:
    started, finished = _parse_time(terminated, "startedAt"), _parse_time(terminated, "finishedAt")
    if started is None or finished is None:
        return timedelta()
    return max(timedelta(), finished - started)
