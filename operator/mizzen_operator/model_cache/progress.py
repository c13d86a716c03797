"""How far a model is on its way into its cache, and what that means for its service: pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from mizzen_operator.api.types import InferenceService
from mizzen_operator.pods.container_state import trouble
from mizzen_operator.resources.fetch_job import cache_place, folder, resolved
from mizzen_operator.rollout.actions import Action, Wanted, without_new
from mizzen_operator.rollout.state import Memory

TELL_PERCENT, TELL_SECONDS = 5, 30.0
"""How much of a model, or how long, makes a download's progress worth a write of the status."""
_MOVING = ("downloading", "verifying", "unpacking", "complete")


@dataclass(frozen=True, slots=True)
class Download:
    """A model on its way into a cache.

    Attributes:
        place: names cache and folder.
        folder: the model's, in the cache.
        revision: what the source was resolved to; empty before.
        total: bytes of the model; 0 before they are known.
        done: bytes that are there.
        rate: bytes a second now.
        left: seconds until the end at this rate; None without one.
        cached: when all was there; empty before.
        failed: why the last try failed; empty while all goes well.
        waits: what it waits for, or tries again.
    """

    place: str
    source: str
    folder: str
    revision: str = ""
    total: int = 0
    done: int = 0
    rate: int = 0
    left: int | None = None
    cached: str = ""
    failed: str = ""
    waits: str = ""

    @property
    def percent(self) -> int:
        """How much is there."""
        return 100 if self.cached else 100 * self.done // self.total if self.total else 0

    def as_status(self) -> dict[str, Any]:
        """`status.model`."""
        found: dict[str, Any] = {
            "place": self.place,
            "source": self.source,
            "folder": self.folder,
            "resolvedRevision": self.revision,
            "cachedTime": self.cached,
            "totalBytes": self.total,
            "fetchedBytes": self.done,
            "downloadPercent": self.percent,
            **({} if self.cached else {"bytesPerSecond": self.rate, "secondsLeft": self.left}),
        }
        return {key: value for key, value in found.items() if value not in ("", None)}

    def words(self) -> str:
        """How far it is, for a condition."""
        if self.cached:
            return f"{self.source} is there, {self.total} bytes, pinned to {self.revision}"
        if self.failed:
            return f"{self.failed}; it is tried again"
        if not self.total:
            return self.waits or f"{self.source} is asked for its files"
        rest = f", {self.left} s left" if self.left is not None else ""
        trouble = f"; {self.waits}" if self.waits else ""
        return f"{self.percent} % of {self.total} bytes, {self.rate} a second{rest}{trouble}"


def finished(service: InferenceService) -> Download | None:
    """What the status remembers of a finished download of the service's model into its cache."""
    known = service.status.get("model", {})
    if known.get("place") != cache_place(service) or not known.get("cachedTime"):
        return None
    total = known.get("totalBytes", 0)
    return Download(
        place=known["place"],
        source=service.model.source,
        folder=folder(service),
        revision=known.get("resolvedRevision", ""),
        total=total,
        done=total,
        cached=known["cachedTime"],
    )


def begun(service: InferenceService, *, waits: str = "", failed: str = "") -> Download:
    """A download of the service's model of which nothing is there yet."""
    return Download(
        cache_place(service),
        service.model.source,
        folder(service),
        resolved(service),
        waits=waits,
        failed=failed,
    )


def worth_telling(said: Download, now: Download, seconds: float) -> bool:
    """Whether a status that was written so long ago should say something else of a download."""
    if replace(now, done=said.done, rate=said.rate, left=said.left) != said:
        return True
    return now != said and (seconds >= TELL_SECONDS or now.percent >= said.percent + TELL_PERCENT)


def read(pod: Mapping[str, Any], said: Mapping[str, Any], begun: Download) -> Download:
    """How far a fetch is: what its pod's status shows, and what the pod itself says, if it does."""
    found = begun
    if said:
        found = replace(
            begun,
            revision=str(said.get("revision", "")) or begun.revision,
            total=_number(said, "totalBytes"),
            done=_number(said, "fetchedBytes"),
            rate=_number(said, "bytesPerSecond"),
            left=_number(said, "secondsLeft") if "secondsLeft" in said else None,
            waits=str(said.get("message", "")),
        )
        if said.get("phase") in _MOVING:
            return found
    status = pod.get("status", {})
    if failure := _failure(status):
        return replace(found, failed=failure)
    scheduled = next((c for c in status.get("conditions", []) if c["type"] == "PodScheduled"), {})
    if scheduled.get("status") == "False":
        return replace(found, waits=f"{pod['metadata']['name']}: {scheduled.get('message', 'not scheduled')}")
    if not said:
        words = "waits for its node, its volumes and its image" if not _started(status) else "has begun"
        return replace(found, waits=f"{pod['metadata']['name']} {words}")
    return found


def _failure(status: Mapping[str, Any]) -> str:
    """Why the last try failed; also while the next one has not got a byte yet."""
    containers = status.get("containerStatuses", [])
    for entry in containers:
        ended = entry.get("state", {}).get("terminated") or entry.get("lastState", {}).get("terminated") or {}
        if ended.get("exitCode", 0) != 0:
            return ended.get("message") or f"its pod ended with exit code {ended['exitCode']}"
    reason, message = trouble(status, containers)
    return message or reason


def _started(status: Mapping[str, Any]) -> bool:
    return any(
        "waiting" not in one.get("state", {"waiting": {}}) for one in status.get("containerStatuses", [])
    )


def _number(said: Mapping[str, Any], name: str) -> int:
    value = said.get(name)
    return max(0, value) if isinstance(value, int) else 0


def result_of(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The last word of a pod that has fetched all; None when it has not, or said nothing."""
    for entry in pod.get("status", {}).get("containerStatuses", []):
        ended = entry.get("state", {}).get("terminated") or {}
        if entry["name"] == "fetch" and ended and ended.get("exitCode") == 0:
            try:
                found = json.loads(ended.get("message", ""))
            except ValueError:
                return None
            return found if isinstance(found, dict) and found.get("revision") else None
    return None


def pinned(service: InferenceService, download: Download | None) -> InferenceService:
    """The service as its status will say: pods that fetch by themselves get its revision."""
    if download is None:
        return service
    return replace(service, status={**service.status, "model": download.as_status()})


def held(wanted: Wanted, download: Download | None) -> Wanted:
    """While a model is on its way nothing is replaced for the sake of it: old groups serve on."""
    return wanted if download is None or download.cached else replace(wanted, paused=True)


def allowed(actions: Sequence[Action], revision: str, download: Download | None) -> Sequence[Action]:
    """Of the plan what may be done: no group is made of a model that is not there."""
    if download is None or download.cached:
        return actions
    return without_new(actions, revision)


def clocked(memory: Memory, download: Download | None) -> Memory:
    """The time that a download took is no rollout's: its clock begins when the model is there."""
    if download is None or not download.cached or memory.progress is None:
        return memory
    begins = max(memory.progress.time, datetime.fromisoformat(download.cached))
    return replace(memory, progress=replace(memory.progress, time=begins))
