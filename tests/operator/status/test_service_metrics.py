# SPDX-License-Identifier: Apache-2.0
"""Series of each service: starts, restarts, rollouts and ages of keys, recorded by the reconciles."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from mizzen_operator.api.key import ServiceKey
from mizzen_operator.kube.objects import timestamp
from mizzen_operator.pods.group import Group
from mizzen_operator.pods.termination_cause import CAUSES, MESSAGE_PREFIXES
from mizzen_operator.status.service_metrics import ServiceMetrics

ROOT = Path(__file__).parents[3]
ENGINE_CAUSES = ROOT / "tests/golden/data/worker_ends.json"
"""File of the termination causes that a golden test finds in the engine's source."""
OPERATIONS = ROOT / "docs/operations.md"
KEY = ServiceKey("llm", "demo")
LABELS = {"namespace": "llm", "service": "demo"}
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
CREATED = "2026-01-02T03:03:05Z"
NEW = Group("demo-a-0-0", "1", 0, "a", 0, created=CREATED, node="n")
SERVING = replace(NEW, containers_ready=True, was_routable=True, routable=True)


def status(
    *,
    progressing: bool = False,
    failed: bool = False,
    since: str = CREATED,
    reason: str = "",
    progress: dict[str, Any] | None = None,
) -> dict[str, Any]:
    true = {"Progressing": progressing, "Failed": failed, "Ready": not (progressing or failed)}
    reasons = {"Progressing": reason or ("StartingGroups" if progressing else "Settled")}
    conditions = [
        {
            "type": name,
            "status": "True" if value else "False",
            "reason": reasons.get(name, "Any"),
            "lastTransitionTime": since,
        }
        for name, value in true.items()
    ]
    counts = dict.fromkeys(("replicas", "readyReplicas", "updatedReplicas", "availableReplicas"), 1)
    return {**counts, "conditions": conditions, **({"progress": progress} if progress else {})}


def progress(serving: int, time: datetime, groups: int = 2) -> dict[str, Any]:
    """Return `status.progress` with these numbers of groups, and the time of the last progress."""
    return {
        "revision": "a",
        "groups": groups,
        "serving": serving,
        "old": 0,
        "time": timestamp(time),
        "stay": 0,
    }


class Series:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = ServiceMetrics(self.registry)
        self.now = NOW

    def reconcile(self, *groups: Group, **state: Any) -> None:
        deadline = state.pop("deadline", 600)
        self.metrics.update(
            KEY,
            wanted=len(groups),
            groups=groups,
            status=status(**state),
            deadline=deadline,
            now=self.now,
        )

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"mizzen_operator_{name}", {**LABELS, **labels})

    def total(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"mizzen_operator_{name}", labels) or 0.0


def test_a_cold_start_is_measured_once_from_creation_to_the_first_route() -> None:
    series = Series()
    series.reconcile(NEW, progressing=True)
    assert (series.value("oldest_start_seconds") or 0) > 60  # by the real clock; the pod is months old
    series.reconcile(SERVING)
    series.reconcile(replace(SERVING, containers_ready=False, routable=False))
    series.reconcile(SERVING)
    assert series.total("group_start_seconds_count") == 1
    assert series.total("group_start_seconds_sum") == 60
    assert series.value("oldest_start_seconds") == 0


@pytest.mark.parametrize("ahead", [-480, 1800], ids=["8 min behind", "30 min ahead"])
def test_a_cold_start_is_measured_by_one_clock(ahead: int) -> None:
    series = Series()
    series.reconcile()
    created = timestamp(NOW - timedelta(seconds=ahead))
    series.reconcile(replace(NEW, created=created, age=1.0))
    series.now += timedelta(seconds=29)
    series.reconcile(replace(SERVING, created=created, age=30.0))
    assert series.total("group_start_seconds_count") == 1
    assert series.total("group_start_seconds_sum") == 30


def test_starts_and_restarts_before_the_first_reconcile_do_not_count() -> None:
    series = Series()
    series.reconcile(replace(SERVING, restarts=7))
    assert series.total("group_start_seconds_count") == 0
    assert series.value("group_restarts_total") == 0
    series.reconcile(replace(SERVING, restarts=9))
    assert series.value("group_restarts_total") == 2


def test_a_pod_that_ended_counts_as_one_restart() -> None:
    series = Series()
    series.reconcile(SERVING)
    ended = replace(SERVING, routable=False, ended=True)
    series.reconcile(ended)
    series.reconcile(ended)
    series.reconcile(replace(NEW, name="demo-a-0-1", attempt=1))
    assert series.value("group_restarts_total") == 1
    series.reconcile(replace(NEW, name="demo-a-0-1", ended=True, terminating=True))
    assert series.value("group_restarts_total") == 1


def test_failures_are_counted_by_the_cause_that_the_engine_gave() -> None:
    series = Series()
    series.reconcile(SERVING)
    died = "rank_died: rank 1 (process 7) was killed by signal 9 (SIGKILL)"
    series.reconcile(replace(SERVING, routable=False, ended=True, reason="Error", message=died))
    second = replace(NEW, name="demo-a-0-1", attempt=1)
    series.reconcile(second)
    loops = replace(
        second, restarts=1, reason="CrashLoopBackOff", message="watchdog: rank 0 made no progress"
    )
    series.reconcile(loops)
    series.reconcile(loops)
    series.reconcile(replace(second, restarts=3, reason="OOMKilled", message="exit code 137"))
    series.reconcile(
        replace(second, restarts=4, reason="Error", message="cannot start with --http-port 1: in use")
    )
    series.reconcile(replace(second, restarts=5, reason="Completed", message="exit code 0"))
    counts = {cause: series.value("group_failures_total", cause=cause) for cause in CAUSES}
    assert {cause: count for cause, count in counts.items() if count} == {
        "rank_died": 1,
        "watchdog": 1,
        "out_of_memory": 2,
        "configuration": 1,
    }
    assert series.value("group_restarts_total") == 6


def test_downloads_have_their_bytes_and_other_services_none() -> None:
    series = Series()
    body = {**status(), "model": {"fetchedBytes": 7, "totalBytes": 9}}
    series.metrics.update(KEY, wanted=1, groups=(), status=body, now=NOW)
    assert (series.value("model_fetched_bytes"), series.value("model_total_bytes")) == (7, 9)
    series.reconcile(SERVING)
    assert series.value("model_fetched_bytes") is None


def test_every_termination_cause_of_the_engine_is_known_and_documented() -> None:
    """The operator shares no code with the engine, so this test compares contract, code and documentation."""
    assert set(json.loads(ENGINE_CAUSES.read_text())["kinds"]) == MESSAGE_PREFIXES
    explained = re.findall(r"^\| `(\w+)` \|", OPERATIONS.read_text(), re.MULTILINE)
    assert set(explained) >= MESSAGE_PREFIXES


def test_a_rollout_has_an_age_and_then_a_duration() -> None:
    series = Series()
    series.reconcile(SERVING, progressing=True, since="2026-01-02T03:02:05Z")
    assert (series.value("rollout_age_seconds") or 0) > 120
    series.now += timedelta(seconds=30)
    series.reconcile(SERVING)
    assert series.value("rollout_age_seconds") == 0
    assert series.total("rollout_duration_seconds_sum", result="complete") == 150
    series.reconcile(SERVING, progressing=True)
    series.reconcile(SERVING, failed=True)
    assert series.total("rollout_duration_seconds_count", result="failed") == 1


OVERDUE = "ProgressDeadlineExceeded"


def test_a_rollout_beyond_its_deadline_is_not_complete() -> None:
    series = Series()
    series.reconcile(NEW, progressing=True, since=timestamp(NOW))
    series.now += timedelta(seconds=700)
    series.reconcile(NEW, reason=OVERDUE, since=timestamp(series.now), progress=progress(1, NOW))
    assert series.total("rollout_duration_seconds_count", result="complete") == 0
    assert (series.value("rollout_age_seconds") or 0) > 0
    series.now += timedelta(seconds=100)
    series.reconcile(SERVING, progress=progress(2, series.now))
    assert series.total("rollout_duration_seconds_sum", result="complete") == 800
    assert series.value("rollout_age_seconds") == 0


@pytest.mark.parametrize("reason", ["Paused", "Deleting"])
def test_a_paused_or_deleted_rollout_has_no_result(reason: str) -> None:
    series = Series()
    series.reconcile(NEW, progressing=True)
    series.reconcile(NEW, reason=reason)
    assert series.value("rollout_age_seconds") == 0
    assert series.total("rollout_duration_seconds_count", result="complete") == 0
    assert series.total("rollout_duration_seconds_count", result="failed") == 0


FAILED = {"failed": True, "reason": "ErrImagePull"}


@pytest.mark.parametrize(
    ("state", "since", "serving", "further", "overdue"),
    [
        ({"reason": OVERDUE}, 0, 1, 700, 100),
        ({"reason": OVERDUE, "deadline": 3600}, 0, 1, 700, 0),
        ({"reason": OVERDUE, "deadline": None}, 0, 1, 700, 0),
        ({"progressing": True}, 7000, 1, 50, 0),
        ({"progressing": True}, 50, 2, 7000, 0),
        ({"progressing": True}, 900, 2, 7000, 300),
        ({"progressing": True, "reason": "Downloading"}, 7000, 1, 7000, 0),
        (FAILED, 0, 1, 700, 100),
        (FAILED, 0, 2, 700, 0),
        ({}, 0, 2, 7000, 0),
        ({"reason": "Paused"}, 0, 0, None, 0),
    ],
)
def test_a_rollout_without_progress_is_overdue_by_the_deadline_in_the_spec(
    state: dict[str, Any], since: int, serving: int, further: int | None, overdue: float
) -> None:
    """A lost group that is not replaced is overdue as well; a slow rollout that makes progress is not."""

    def ago(seconds: float) -> datetime:
        return datetime.now(UTC) - timedelta(seconds=seconds)

    series = Series()
    known = progress(serving, ago(further)) if further is not None else None
    series.reconcile(NEW, since=timestamp(ago(since)), progress=known, **state)
    value = series.value("rollout_overdue_seconds")
    assert value is not None
    assert overdue <= value <= (overdue + 60 if overdue else 0)


def test_the_series_of_a_service_exist_until_it_is_deleted() -> None:
    series = Series()
    series.reconcile(SERVING, SERVING)
    series.metrics.record_keys_created(KEY, "2026-01-02T03:04:05Z")
    assert series.value("service_condition", condition="Ready") == 1
    assert series.value("service_condition", condition="Failed") == 0
    assert series.value("service_groups", state="wanted") == 2
    assert (series.value("keys_age_seconds") or 0) > 0
    series.metrics.forget(KEY)
    assert [
        sample
        for family in series.registry.collect()
        for sample in family.samples
        if sample.labels.get("service")
    ] == []


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=30))
def test_restarts_never_decrease_and_there_is_at_most_one_start_per_pod(
    reconciles: list[tuple[int, bool, bool]],
) -> None:
    series = Series()
    names: set[str] = set()
    last = 0.0
    for number, routable, ended in reconciles:
        name = f"demo-a-{number}"
        names.add(name)
        series.reconcile(
            replace(NEW, name=name, routable=routable and not ended, ended=ended, restarts=number)
        )
        restarts = series.value("group_restarts_total") or 0.0
        assert restarts >= last
        last = restarts
    assert series.total("group_start_seconds_count") <= len(reconciles)
