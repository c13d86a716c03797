# SPDX-License-Identifier: Apache-2.0
"""Progress of downloads, and its consequences for a rollout."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marks import CONTROL_PLANE
from mizzen_operator.api.types import InferenceService
from mizzen_operator.model_cache.progress import (
    Download,
    allowed_actions,
    finish_download,
    load_finished_download,
    pause_during_download,
    read_progress,
    restart_progress_clock,
    should_report,
)
from mizzen_operator.resources.fetch_job import cache_folder, cache_location
from mizzen_operator.rollout.actions import CreateGroup, DeleteGroup, RolloutTarget
from mizzen_operator.rollout.state import RolloutProgress, RolloutState

pytestmark = CONTROL_PLANE
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL: dict[str, Any] = {
    "source": "hf://Qwen/Qwen3-0.6B@main",
    "credentialsSecretRef": {"name": "hub", "key": "token"},
    "cache": {"mode": "PersistentVolumeClaim", "claimName": "weights", "size": "10Gi"},
}
DOWNLOADING = {
    "phase": "downloading",
    "revision": COMMIT,
    "totalBytes": 1000,
    "fetchedBytes": 250,
    "bytesPerSecond": 50,
    "secondsLeft": 15,
}
Make = Callable[..., InferenceService]


@pytest.fixture
def service(service: Make) -> Make:
    def make(model: dict[str, Any] | None = None, **spec: Any) -> InferenceService:
        return service(model={**MODEL, **(model or {})}, **spec)

    return make


def test_a_finished_download_of_another_model_or_cache_does_not_count(service: Make) -> None:
    one = service()
    known = {
        "place": cache_location(one),
        "folder": cache_folder(one),
        "resolvedRevision": COMMIT,
        "totalBytes": 7,
    }
    assert load_finished_download(replace(one, status={"model": known})) is None
    known["cachedTime"] = "2026-01-01T00:00:00Z"
    found = load_finished_download(replace(one, status={"model": known}))
    assert found is not None and found.revision == COMMIT and found.percent == 100
    assert load_finished_download(replace(service({"source": "hf://a/b"}), status={"model": known})) is None


BEGUN = Download("p", "hf://a/b", "b-1")


def test_the_sizes_of_a_fetched_model_are_kept_in_the_status(service: Make) -> None:
    one = service()
    begun = Download(cache_location(one), "hf://a/b", cache_folder(one))
    result = {"revision": COMMIT, "bytes": 7, "files": 1, "parameters": 9 * 10**9, "dtype": "float32"}
    result |= {"weightBytes": 5 * 10**9}
    done = finish_download(begun, result, "2026-01-01T00:00:00Z")
    assert (done.parameters, done.dtype, done.percent) == (9 * 10**9, "float32", 100)
    status = done.as_status()
    assert (status["parameters"], status["dtype"]) == (9 * 10**9, "float32")
    assert status["weightBytes"] == done.weight_bytes == 5 * 10**9
    again = load_finished_download(replace(one, status={"model": status}))
    assert again is not None and (again.parameters, again.dtype, again.weight_bytes) == (
        9 * 10**9,
        "float32",
        5 * 10**9,
    )


@pytest.mark.parametrize("sizes", [{}, {"parameters": "many", "dtype": 1}, {"parameters": -1, "dtype": None}])
def test_a_result_without_valid_sizes_leaves_them_unknown(sizes: dict[str, Any]) -> None:
    done = finish_download(BEGUN, {"revision": COMMIT, "bytes": 7, **sizes}, "2026-01-01T00:00:00Z")
    assert (done.parameters, done.dtype, done.total_bytes) == (0, "", 7)
    assert not {"parameters", "dtype"} & done.as_status().keys()


SOURCES = st.from_regex(r"(hf|s3|oci)://[A-Za-z0-9._~@+=/-]{1,80}", fullmatch=True)


@given(SOURCES, SOURCES)
def test_folders_are_valid_names_and_differ_by_source(one: str, two: str) -> None:
    def of(source: str) -> str:
        model, access = type("M", (), {"source": source}), type("A", (), {"endpoint": ""})
        return cache_folder(type("S", (), {"model": model, "access": access}))  # type: ignore[arg-type]

    assert (of(one) == of(two)) == (one == two)
    assert set(of(one)) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-")
    assert 1 <= len(of(one)) <= 63 and of(one)[0] not in ".-"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=9),
        lambda inner: st.dictionaries(st.sampled_from([*DOWNLOADING, "message"]), inner, max_size=5),
        max_leaves=9,
    )
)
def test_any_answer_of_a_pod_makes_a_valid_status(said: Any) -> None:
    said = said if isinstance(said, dict) else {}
    found = read_progress({"metadata": {"name": "p"}, "status": {}}, said, BEGUN)
    status = found.as_status()
    assert json.dumps(status) and found.describe() and not found.cached_time
    numbers = ("totalBytes", "fetchedBytes", "bytesPerSecond", "secondsLeft", "downloadPercent")
    assert all(status[name] >= 0 for name in numbers if name in status)


def test_no_group_is_created_while_its_model_is_downloading() -> None:
    actions = [CreateGroup("n", 0, "new", 0, "Missing"), CreateGroup("o", 0, "old", 0, "Restored")]
    actions.append(DeleteGroup("x", "u", "Ended", ()))  # type: ignore[arg-type]
    wanted = RolloutTarget("demo", 2, "new")
    cached = replace(BEGUN, cached_time="2026-01-01T00:00:00Z")
    assert (
        allowed_actions(actions, "new", BEGUN) == actions[1:] and pause_during_download(wanted, BEGUN).paused
    )
    for download in (None, cached):
        assert (
            allowed_actions(actions, "new", download) == actions
            and pause_during_download(wanted, download) == wanted
        )


@pytest.mark.parametrize(
    ("change", "seconds", "reported"),
    [
        ({}, 1000.0, False),
        ({"fetched_bytes": 449}, 29.0, False),
        ({"fetched_bytes": 449}, 30.0, True),
        ({"fetched_bytes": 450}, 1.0, True),
        ({"bytes_per_second": 7, "seconds_left": 9}, 29.0, False),
        ({"bytes_per_second": 7, "seconds_left": 9}, 30.0, True),
        ({"waiting_for": "the hub asks for a pause"}, 1.0, True),
        ({"error": "no room is left"}, 1.0, True),
        ({"total_bytes": 1001}, 1.0, True),
    ],
)
def test_a_download_is_reported_after_enough_progress_or_a_change(
    change: dict[str, Any], seconds: float, reported: bool
) -> None:
    known = replace(BEGUN, total_bytes=1000, fetched_bytes=400, bytes_per_second=5, seconds_left=120)
    assert should_report(known, replace(known, **change), seconds) is reported


def test_the_progress_clock_of_a_rollout_starts_when_the_download_ends() -> None:
    time = datetime(2026, 1, 1, tzinfo=UTC)
    memory = RolloutState(progress=RolloutProgress("new", 2, 0, 2, time))
    later = time + timedelta(hours=3)
    cached = replace(BEGUN, cached_time=later.isoformat())
    moved = restart_progress_clock(memory, cached, later).progress
    assert moved is not None and moved.time == later
    for unchanged in (BEGUN, None, replace(cached, cached_time=(time - timedelta(hours=1)).isoformat())):
        assert restart_progress_clock(memory, unchanged, later) == memory
    slow = later - timedelta(minutes=30)  # the clock of this leader is behind that of the last one
    limited = restart_progress_clock(memory, cached, slow).progress
    assert limited is not None and limited.time == slow
