# SPDX-License-Identifier: Apache-2.0
"""Startup timings of groups, and `status.coldStart`."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen_operator.kube.objects import timestamp
from mizzen_operator.pods.cold_start import (
    NOT_STARTED,
    StartupTimings,
    cold_start_entry,
    merge_startup_timings,
    read_startup_timings,
)
from mizzen_operator.status import builder
from service_kit import GOOD, NOW

BEGAN = datetime(2026, 1, 2, 3, 0, 0, tzinfo=UTC)
PARTS = ("pendingSeconds", "imagePullSeconds", "downloadSeconds", "loadSeconds", "warmupSeconds")


def at(seconds: float) -> str:
    return timestamp(BEGAN + timedelta(seconds=seconds))


def pod(scheduled: float, fetch: tuple[float, float] | None, began: float, ready: float) -> dict[str, Any]:
    """Return an engine pod; the arguments are times of its startup, in seconds after its creation."""
    fetched = {"startedAt": at(fetch[0]), "finishedAt": at(fetch[1]), "exitCode": 0} if fetch else {}
    return {
        "metadata": {"creationTimestamp": at(0)},
        "status": {
            "conditions": [
                {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(scheduled)},
                {"type": "ContainersReady", "status": "True", "lastTransitionTime": at(ready)},
            ],
            "initContainerStatuses": [{"name": "fetch", "state": {"terminated": fetched}}] if fetch else [],
            "containerStatuses": [
                {"name": "sidecar", "state": {"running": {"startedAt": at(999)}}},
                {"name": "engine", "state": {"running": {"startedAt": at(began)}}},
            ],
        },
    }


def parts(start: StartupTimings, end: float) -> list[int]:
    found = cold_start_entry("demo-a-0-0", start, BEGAN + timedelta(seconds=end))
    assert (found["group"], found["time"]) == ("demo-a-0-0", at(end))
    assert found["firstReadySeconds"] == sum(found[name] for name in PARTS)
    return [found[name] for name in PARTS]


def test_each_stage_begins_where_the_previous_one_ends() -> None:
    assert parts(read_startup_timings(pod(3, None, 13, 54)), 60) == [3, 10, 0, 41, 6]
    assert parts(read_startup_timings(pod(3, (5, 45), 50, 54)), 60) == [3, 7, 40, 4, 6]


def test_a_stage_without_a_time_counts_towards_the_next_stage() -> None:
    assert parts(read_startup_timings({"metadata": {"creationTimestamp": at(0)}}), 60) == [0, 0, 0, 0, 60]
    unready = pod(3, None, 13, 54)
    unready["status"]["conditions"][1]["status"] = "False"
    assert parts(read_startup_timings(unready), 60) == [3, 10, 0, 0, 47]
    assert parts(NOT_STARTED, 60) == [0, 0, 0, 0, 0]


def test_a_group_passes_a_stage_with_its_last_pod() -> None:
    both = merge_startup_timings(
        [read_startup_timings(pod(3, None, 13, 54)), read_startup_timings(pod(20, (21, 30), 31, 40))]
    )
    assert parts(both, 60) == [20, 2, 9, 23, 6]
    assert merge_startup_timings([read_startup_timings(pod(3, None, 13, 54)), NOT_STARTED]).ready is None


times = st.none() | st.floats(-100, 200).map(lambda seconds: BEGAN + timedelta(seconds=seconds))


@given(
    st.builds(
        StartupTimings, times, times, st.floats(0, 300).map(lambda s: timedelta(seconds=s)), times, times
    ),
    st.floats(0, 200),
)
def test_whatever_the_clocks_no_stage_is_negative_and_the_stages_add_up(
    start: StartupTimings, end: float
) -> None:
    found = cold_start_entry("x", start, BEGAN + timedelta(seconds=end))
    assert all(found[name] >= 0 for name in PARTS)
    assert found["firstReadySeconds"] == sum(found[name] for name in PARTS)


@pytest.mark.parametrize("known", [{}, {"coldStart": {"group": "before"}}])
def test_the_status_keeps_the_latest_cold_start(known: dict[str, Any]) -> None:
    before = replace(GOOD, service=replace(GOOD.service, status=known))
    assert builder.build_status(before, NOW).get("coldStart") == known.get("coldStart")
    new = cold_start_entry(
        "demo-a-0-0", read_startup_timings(pod(3, None, 13, 54)), BEGAN + timedelta(seconds=60)
    )
    assert builder.build_status(replace(before, cold_start=new), NOW)["coldStart"] == new
