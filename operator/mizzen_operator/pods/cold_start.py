"""Where the time goes until gateways route to a group, by the times in its pods. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.kube.objects import stamp


@dataclass(frozen=True, slots=True)
class Start:
    """When a pod came how far, as its status says; None for what it does not say (yet).

    Attributes:
        scheduled: it got its node.
        fetched: how long it fetched the model itself.
        began: its engine's process began, for the last time.
        ready: its engine was ready.
    """

    created: datetime | None = None
    scheduled: datetime | None = None
    fetched: timedelta = timedelta()
    began: datetime | None = None
    ready: datetime | None = None


NOT_STARTED = Start()


def read_start(pod: Mapping[str, Any]) -> Start:
    """Read an engine's pod."""
    status = pod.get("status", {})
    true = {one["type"]: one for one in status.get("conditions", []) if one.get("status") == "True"}
    engines = [one for one in status.get("containerStatuses", []) if one.get("name") == labels.ENGINE]
    running = [one.get("state", {}).get("running") or {} for one in engines]
    fetches = [
        one.get("state", {}).get("terminated") or {} for one in status.get("initContainerStatuses", [])
    ]
    return Start(
        created=_time(pod["metadata"], "creationTimestamp"),
        scheduled=_time(true.get("PodScheduled", {}), "lastTransitionTime"),
        fetched=sum(map(_length, fetches), timedelta()),
        began=max(filter(None, (_time(one, "startedAt") for one in running)), default=None),
        ready=_time(true.get("ContainersReady", {}), "lastTransitionTime"),
    )


def whole(starts: Sequence[Start]) -> Start:
    """The start of a group of several pods: it is as late as the last of them."""

    def last(times: Sequence[datetime | None]) -> datetime | None:
        known = [time for time in times if time is not None]
        return max(known) if len(known) == len(times) else None

    return Start(
        created=min(filter(None, (one.created for one in starts)), default=None),
        scheduled=last([one.scheduled for one in starts]),
        fetched=max((one.fetched for one in starts), default=timedelta()),
        began=last([one.began for one in starts]),
        ready=last([one.ready for one in starts]),
    )


def cold_start(name: str, start: Start, now: datetime) -> dict[str, Any]:
    """`status.coldStart` of a group that all gateways route to from now on.

    Its parts follow one another without a gap, whatever the clocks of scheduler, node and operator say: none
    is negative, and together they are the whole.
    """
    end = now.replace(microsecond=0)
    points = [min(start.created or end, end)]
    for time in (start.scheduled, start.began, start.ready, end):
        points.append(min(end, max(points[-1], time or points[-1])))
    pending, begin, load, warm = (
        round((after - before).total_seconds()) for before, after in pairwise(points)
    )
    download = min(begin, round(start.fetched.total_seconds()))
    return {
        "group": name,
        "time": stamp(end),
        "pendingSeconds": pending,
        "imagePullSeconds": begin - download,
        "downloadSeconds": download,
        "loadSeconds": load,
        "warmupSeconds": warm,
        "firstReadySeconds": pending + begin + load + warm,
    }


def _time(given: Mapping[str, Any], name: str) -> datetime | None:
    return datetime.fromisoformat(given[name]) if given.get(name) else None


def _length(ended: Mapping[str, Any]) -> timedelta:
    began, end = _time(ended, "startedAt"), _time(ended, "finishedAt")
    return max(timedelta(), end - began) if began is not None and end is not None else timedelta()
