# SPDX-License-Identifier: Apache-2.0
"""Progress of a model's download into its cache, and its consequences for the rollout. Pure.

`model_cache/fetch.py` reads the progress from the fetch Job's pod; the reconciler holds rollouts back until
the download is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.api.types import InferenceService
from mizzen_operator.pods.container_state import read_problem, unfinished_init_containers
from mizzen_operator.resources.fetch_job import cache_folder, cache_location, resolved_revision
from mizzen_operator.resources.option_fields import translate_fetch_options
from mizzen_operator.rollout.actions import Action, RolloutTarget, drop_creations
from mizzen_operator.rollout.state import RolloutState

REPORT_PERCENT, REPORT_SECONDS = 5, 30.0
"""Progress in percentage points, or age of a report in seconds, after which the status is written again."""
_MOVING_PHASES = ("downloading", "verifying", "unpacking", "complete")
"""Phases in which the fetch makes progress."""


@dataclass(frozen=True, slots=True)
class Download:
    """The download of a model into a cache.

    Attributes:
        cache_key: identifies the cache and the folder in it; reported as `status.model.place`.
        source: source of the model, as in the spec.
        folder: folder of the model in the cache.
        revision: revision that the source was resolved to; empty until the source is resolved.
        total_bytes: size of the model; 0 while it is unknown.
        fetched_bytes: bytes of the model that are in the cache.
        bytes_per_second: current rate of the download.
        seconds_left: remaining seconds at this rate; None if it is unknown.
        cached_time: time at which the download was completed; empty until then.
        parameters: number of parameters of the model; 0 while it is unknown.
        dtype: data type in which its weights are saved; empty while it is unknown.
        weight_bytes: bytes of its quantized weights in memory; 0 if they are unquantized or unknown.
        error: error of the last attempt; empty if it succeeded.
        waiting_for: reason why the fetch is waiting or retrying; empty while it makes progress.
    """

    cache_key: str
    source: str
    folder: str
    revision: str = ""
    total_bytes: int = 0
    fetched_bytes: int = 0
    bytes_per_second: int = 0
    seconds_left: int | None = None
    cached_time: str = ""
    parameters: int = 0
    dtype: str = ""
    weight_bytes: int = 0
    error: str = ""
    waiting_for: str = ""

    @property
    def percent(self) -> int:
        """Percentage of the model that has been fetched; 0 while the size of the model is unknown."""
        if self.cached_time:
            return 100
        return 100 * self.fetched_bytes // self.total_bytes if self.total_bytes else 0

    def as_status(self) -> dict[str, Any]:
        """Return the download as `status.model` reports it."""
        rate = {"bytesPerSecond": self.bytes_per_second, "secondsLeft": self.seconds_left}
        fields: dict[str, Any] = {
            "place": self.cache_key,
            "source": self.source,
            "folder": self.folder,
            "resolvedRevision": self.revision,
            "cachedTime": self.cached_time,
            "totalBytes": self.total_bytes,
            "parameters": self.parameters or None,
            "dtype": self.dtype,
            "weightBytes": self.weight_bytes or None,
            "fetchedBytes": self.fetched_bytes,
            "downloadPercent": self.percent,
            **({} if self.cached_time else rate),
        }
        return {key: value for key, value in fields.items() if value not in ("", None)}

    def describe(self) -> str:
        """Return the progress as a condition's message."""
        if self.cached_time:
            return f"{self.source} is complete, {self.total_bytes} bytes, pinned to {self.revision}"
        if self.error:
            return f"{self.error}; retrying"
        if not self.total_bytes:
            return self.waiting_for or f"listing the files of {self.source}"
        left = f", {self.seconds_left} s left" if self.seconds_left is not None else ""
        note = f"; {self.waiting_for}" if self.waiting_for else ""
        return f"{self.percent} % of {self.total_bytes} bytes, {self.bytes_per_second} a second{left}{note}"


def load_finished_download(service: InferenceService) -> Download | None:
    """Return the finished download of the spec's model into the spec's cache; None if the status has none."""
    model = service.status.get("model", {})
    if model.get("place") != cache_location(service) or not model.get("cachedTime"):
        return None
    total = model.get("totalBytes", 0)
    return Download(
        cache_key=model["place"],
        source=service.model.source,
        folder=cache_folder(service),
        revision=model.get("resolvedRevision", ""),
        total_bytes=total,
        fetched_bytes=total,
        cached_time=model["cachedTime"],
        parameters=model.get("parameters", 0),
        dtype=model.get("dtype", ""),
        weight_bytes=model.get("weightBytes", 0),
    )


def new_download(service: InferenceService, *, waiting_for: str = "", error: str = "") -> Download:
    """Create the download of a service's model, without any progress."""
    return Download(
        cache_key=cache_location(service),
        source=service.model.source,
        folder=cache_folder(service),
        revision=resolved_revision(service),
        waiting_for=waiting_for,
        error=error,
    )


def should_report(reported: Download, current: Download, seconds: float) -> bool:
    """Return whether the status of a download should be written again.

    Args:
        reported: the download as the status shows it.
        current: the download as it is now.
        seconds: age of `reported`.
    """
    same_numbers = replace(
        current,
        fetched_bytes=reported.fetched_bytes,
        bytes_per_second=reported.bytes_per_second,
        seconds_left=reported.seconds_left,
    )
    if same_numbers != reported:
        return True
    advanced = current.percent >= reported.percent + REPORT_PERCENT
    return current != reported and (seconds >= REPORT_SECONDS or advanced)


def read_progress(pod: Mapping[str, Any], answer: Mapping[str, Any], download: Download) -> Download:
    """Return a download with the progress that the fetch Job's pod reports.

    Args:
        pod: the fetch Job's pod.
        answer: the pod's response to `/progress`; empty if it does not respond.
        download: the download without any progress.
    """
    progress = download
    if answer:
        progress = replace(
            download,
            revision=str(answer.get("revision", "")) or download.revision,
            total_bytes=_non_negative(answer, "totalBytes"),
            fetched_bytes=_non_negative(answer, "fetchedBytes"),
            bytes_per_second=_non_negative(answer, "bytesPerSecond"),
            seconds_left=_non_negative(answer, "secondsLeft") if "secondsLeft" in answer else None,
            waiting_for=str(answer.get("message", "")),
        )
        if answer.get("phase") in _MOVING_PHASES:
            return progress
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    if error := _pod_error(status):
        return replace(progress, error=error)
    conditions = status.get("conditions", [])
    scheduled = next((entry for entry in conditions if entry["type"] == "PodScheduled"), {})
    if scheduled.get("status") == "False":
        message = scheduled.get("message", "not scheduled")
        return replace(progress, waiting_for=f"{name}: {message}")
    if not answer:
        state = "has started" if _has_started(status) else "waits for its node, its volumes and its image"
        return replace(progress, waiting_for=f"{name} {state}")
    return progress


def read_result(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the result in a pod's termination message; None if the fetch has not succeeded."""
    for container in fetch_containers(pod.get("status", {})):
        terminated = container.get("state", {}).get("terminated") or {}
        if terminated and terminated.get("exitCode") == 0:
            try:
                result = json.loads(terminated.get("message", ""))
            except ValueError:
                return None
            return result if isinstance(result, dict) and result.get("revision") else None
    return None


def fetch_containers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the status of a fetch pod's own container; admission may have injected other containers."""
    return [entry for entry in status.get("containerStatuses", []) if entry.get("name") == labels.FETCH]


def is_kept_by_sidecar(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod has fetched its model, but runs on because of another container."""
    status = pod.get("status", {})
    if "deletionTimestamp" in pod["metadata"] or status.get("phase") in ("Succeeded", "Failed"):
        return False
    ended = [entry.get("state", {}).get("terminated") or {} for entry in fetch_containers(status)]
    others = [entry for entry in status.get("containerStatuses", []) if entry.get("name") != labels.FETCH]
    return bool(others) and any(terminated.get("exitCode") == 0 for terminated in ended)


def _pod_error(status: Mapping[str, Any]) -> str:
    """Return why the last attempt to fetch failed, even while the next one runs; empty if it did not.

    Problems of init containers, which a native sidecar is too, count until the fetch container has started.
    """
    containers = fetch_containers(status)
    for container in containers:
        state, previous = container.get("state", {}), container.get("lastState", {})
        terminated = state.get("terminated") or previous.get("terminated") or {}
        if terminated.get("exitCode", 0) != 0:
            message = translate_fetch_options(terminated.get("message", ""))
            return message or f"its pod ended with exit code {terminated['exitCode']}"
    blocking = [] if _has_started(status) else unfinished_init_containers(status)
    reason, message = read_problem(status, [*containers, *blocking])
    return message or reason


def _has_started(status: Mapping[str, Any]) -> bool:
    return any(
        "waiting" not in container.get("state", {"waiting": {}}) for container in fetch_containers(status)
    )


def finish_download(download: Download, result: Mapping[str, Any], time: str) -> Download:
    """Return a download that was completed at `time`, with the result that its pod reports."""
    total, dtype = _non_negative(result, "bytes"), result.get("dtype")
    return replace(
        download,
        revision=str(result.get("revision", "")),
        total_bytes=total,
        fetched_bytes=total,
        cached_time=time,
        parameters=_non_negative(result, "parameters"),
        dtype=dtype if isinstance(dtype, str) else "",
        weight_bytes=_non_negative(result, "weightBytes"),
    )


def _non_negative(answer: Mapping[str, Any], name: str) -> int:
    value = answer.get(name)
    return max(0, value) if isinstance(value, int) else 0


def pin_revision(service: InferenceService, download: Download | None) -> InferenceService:
    """Return the service with the download in its status, so that engines load the resolved revision."""
    if download is None:
        return service
    return replace(service, status={**service.status, "model": download.as_status()})


def pause_during_download(target: RolloutTarget, download: Download | None) -> RolloutTarget:
    """Return the planner's input, paused while the model is downloading: old groups keep serving."""
    return target if download is None or download.cached_time else replace(target, paused=True)


def allowed_actions(actions: Sequence[Action], revision: str, download: Download | None) -> Sequence[Action]:
    """Return the actions of a plan that can be executed while the model is downloading.

    Args:
        actions: the plan.
        revision: revision of the service that needs the model.
        download: download of the model; None if the service uses no cache.
    """
    if download is None or download.cached_time:
        return actions
    return drop_creations(actions, revision)


def restart_progress_clock(state: RolloutState, download: Download | None, now: datetime) -> RolloutState:
    """Return the rollout state with a progress clock that starts at the end of the download or later.

    The time of a download does not count towards a rollout's progress deadline. The clock never starts after
    `now`: another leader, whose clock may be ahead, may have written the time of the download's end.
    """
    if download is None or not download.cached_time or state.progress is None:
        return state
    time = max(state.progress.time, min(now, datetime.fromisoformat(download.cached_time)))
    return replace(state, progress=replace(state.progress, time=time))
