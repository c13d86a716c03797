"""Brings a service's model into its cache by a Job, and says how far it is.

The Job's pod tells it all: its termination message the result or the failure, its `/progress` the bytes. Once
the status says that the model is there, nothing is asked any more: no Job is read, and none is made again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import aiohttp

from mizzen_operator import labels
from mizzen_operator.api import InferenceService
from mizzen_operator.apply import Refused, name_taken
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube import Kube, KubeError, Ref
from mizzen_operator.metrics import Metrics
from mizzen_operator.observe import owned, trouble
from mizzen_operator.plan import Action, CreateGroup, Wanted
from mizzen_operator.render.model import cache_claim, cache_place, fetch_job, folder, resolved
from mizzen_operator.rollout import Memory, stamp

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""How often progress is asked for."""
_ASK_SECONDS = 2.0
_MAX_ANSWER = 64 * 1024
_MOVING = ("downloading", "verifying", "unpacking", "complete")
JOB_NAME = "batch.kubernetes.io/job-name"


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


def recall(service: InferenceService) -> Download | None:
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


class Models:
    """The fetches of all services."""

    def __init__(self, kube: Kube, config: OperatorConfig, metrics: Metrics) -> None:
        self._kube = kube
        self._config = config
        self._metrics = metrics

    async def sync(self, service: InferenceService) -> Download | None:
        """Do what is next for a service's model; None when it needs no fetch.

        Raises:
            Refused: an object of a name that is needed belongs to something else, or cannot be made.
            KubeError: the API server failed.
        """
        if not service.access.cached:
            if service.status.get("model"):
                await self._remove(service, kept="")
            return None
        if (known := recall(service)) is not None:
            return known
        begun = Download(cache_place(service), service.model.source, folder(service), resolved(service))
        if service.suspend:
            return replace(begun, waits="spec.suspend is true")
        await self._claim(service)
        job = fetch_job(service, self._config)
        name = job["metadata"]["name"]
        live = await self._kube.get(Ref("Job", service.namespace, name))
        if live is None:
            await self._remove(service, kept=name)
            await self._make(job)
        elif not owned(live, service.uid):
            raise name_taken({"kind": "Job", "metadata": {"name": name}})
        download = await self._look(service, name, begun)
        done = (live or {}).get("status", {}).get("succeeded", 0)
        if (
            done and not download.cached
        ):  # its pod is gone, and with it what it said: the next one finds all there
            await self._delete(live or job)
        if download.cached:
            await self._remove(service, kept=name)
        return download

    async def _look(self, service: InferenceService, job: str, begun: Download) -> Download:
        """What the pods of a Job say."""
        pods = await self._kube.list(Ref("Pod", service.namespace), f"{labels.SERVICE}={service.name}")
        mine = [pod for pod in pods if pod["metadata"].get("labels", {}).get(JOB_NAME) == job]
        for pod in mine:
            if (result := _result(pod)) is not None:
                now = stamp(datetime.now(UTC))
                total, revision = int(result.get("bytes", 0)), str(result.get("revision", ""))
                return replace(begun, revision=revision, total=total, done=total, cached=now)
        live = [pod for pod in mine if "deletionTimestamp" not in pod["metadata"]]
        if not live:
            return replace(begun, waits="its pod is being made")
        pod = max(live, key=lambda pod: pod["metadata"].get("creationTimestamp", ""))
        return read(pod, await self._progress(pod), begun)

    async def _progress(self, pod: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a pod says of its progress; empty when it does not answer."""
        address, status = pod.get("status", {}).get("podIP", ""), pod.get("status", {})
        running = any("running" in one.get("state", {}) for one in status.get("containerStatuses", []))
        if not address or not running:
            return {}
        host = f"[{address}]" if ":" in address else address
        timeout = aiohttp.ClientTimeout(total=_ASK_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
                session.get(f"http://{host}:{labels.FETCH_PORT}/progress", allow_redirects=False) as answer,
            ):
                found = json.loads(await answer.content.read(_MAX_ANSWER)) if answer.status == 200 else {}
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    async def _claim(self, service: InferenceService) -> None:
        """Make the cache's claim where it is missing; one that is there stays as it is."""
        claim = cache_claim(service)
        if claim is None:
            return
        ref = Ref("PersistentVolumeClaim", service.namespace, claim["metadata"]["name"])
        if await self._kube.get(ref) is None:
            await self._make(claim)

    async def _make(self, manifest: dict[str, Any]) -> None:
        kind = manifest["kind"]
        try:
            if await self._kube.create(manifest):
                self._metrics.actions.labels(f"Create{kind}").inc()
        except KubeError as error:
            if error.code in (400, 403, 422):
                raise Refused(f"{kind}Rejected", f"the API server rejects the {kind}: {error}") from error
            raise

    async def _remove(self, service: InferenceService, *, kept: str) -> None:
        """Delete the service's Jobs but one."""
        selector = f"{labels.SERVICE}={service.name},{labels.COMPONENT}={labels.FETCH}"
        for job in await self._kube.list(Ref("Job", service.namespace), selector):
            if owned(job, service.uid) and job["metadata"]["name"] != kept:
                await self._delete(job)

    async def _delete(self, job: Mapping[str, Any]) -> None:
        meta = job["metadata"]
        if "uid" in meta:
            self._metrics.actions.labels("DeleteJob").inc()
            await self._kube.delete(Ref("Job", meta["namespace"], meta["name"]), meta["uid"], "Background")


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


def _result(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
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
    return [a for a in actions if not (isinstance(a, CreateGroup) and a.revision == revision)]


def clocked(memory: Memory, download: Download | None) -> Memory:
    """The time that a download took is no rollout's: its clock begins when the model is there."""
    if download is None or not download.cached or memory.progress is None:
        return memory
    begins = max(memory.progress.time, datetime.fromisoformat(download.cached))
    return replace(memory, progress=replace(memory.progress, time=begins))
