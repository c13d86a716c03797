"""Brings a service's model into its cache by a Job, and says how far it is.

The Job's pod tells it all: its termination message the result or the failure, its `/progress` the bytes. Once
the status says that the model is there, nothing is asked any more: no Job is read, and none is made again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import aiohttp

from mizzen_operator.api import labels
from mizzen_operator.api.key import Key
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.apply import Refused, name_taken
from mizzen_operator.kube.client import Kube, KubeError, Ref
from mizzen_operator.kube.errors import REJECTED, rejection
from mizzen_operator.kube.objects import holds, owned, stamp
from mizzen_operator.metrics import Metrics
from mizzen_operator.model_cache.progress import Download, begun, finished, read, result_of, worth_telling
from mizzen_operator.resources.fetch_job import cache_claim, fetch_job, fetch_pod

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""How often progress is asked for."""
_ASK_SECONDS = 2.0
_MAX_ANSWER = 64 * 1024
NO_DRY_RUN = "does not support dry run"
"""Says a webhook that must not be asked what it would say."""
PODLESS_SECONDS = 10.0
"""A Job that has had no pod for so long is asked about."""
ASK_AGAIN_SECONDS = 60.0
"""A dry run takes a write of the API server's and its webhooks' time."""


@dataclass(frozen=True, slots=True)
class _Podless:
    """A Job without a pod that goes on: when its pod is asked for next, and what is said until then."""

    uid: str
    ask: float
    says: str = ""


class Models:
    """The fetches of all services."""

    def __init__(self, kube: Kube, config: OperatorConfig, metrics: Metrics) -> None:
        self._kube = kube
        self._config = config
        self._metrics = metrics
        self._said: dict[Key, tuple[Download, float]] = {}
        """What the status says of each download that is under way, and since when."""
        self._podless: dict[Key, _Podless] = {}
        """Jobs without a pod that goes on."""

    def told(self, key: Key, download: Download | None) -> Download | None:
        """A download as the status should tell of it: what it says already, while little has come since."""
        if download is None or download.cached:
            self._said.pop(key, None)
            self._podless.pop(key, None)
            return download
        said, since = self._said.get(key, (None, 0.0))
        if said is not None and not worth_telling(said, download, time.monotonic() - since):
            return said
        self._said[key] = (download, time.monotonic())
        return download

    async def sync(self, service: InferenceService, *, unused: bool = False) -> Download | None:
        """Do what is next for a service's model; None when it needs no fetch.

        Args:
            service: whose model it is.
            unused: no pod of it has the cache mounted, so somebody may have deleted the claim.

        Raises:
            Refused: an object of a name that is needed belongs to something else, or cannot be made.
            KubeError: the API server failed.
        """
        if not service.access.cached:
            if service.status.get("model"):
                await self._remove(service, kept="")
            return None
        if (known := finished(service)) is not None:
            if not (unused and service.groups and await self._claim_is_gone(service)):
                return known
            await self._remove(service, kept="")
            return begun(service, waits="its claim is gone: it is fetched anew")
        if service.suspend:
            return begun(service, waits="spec.suspend is true")
        await self._claim(service)
        job = fetch_job(service, self._config)
        name = job["metadata"]["name"]
        live = await self._kube.get(Ref("Job", service.namespace, name))
        if live is None:
            await self._remove(service, kept=name)
            await self._make(job)
        elif not owned(live, service.uid):
            raise name_taken({**live, "kind": "Job"}, service.name)
        download = await self._look(service, live)
        if live is not None and _has_ended(live) and not download.cached:
            # Its pod is gone, and with it what it said: the next one finds all there.
            await self._delete(live)
        elif download.cached:
            await self._remove(service, kept=name)
        return download

    async def _look(self, service: InferenceService, job: Mapping[str, Any] | None) -> Download:
        """What the pods of a Job say; of a former one of its name they say nothing of what is there now."""
        key, start = Key(service.namespace, service.name), begun(service)
        uid = job["metadata"]["uid"] if job is not None else ""
        pods = await self._kube.list(Ref("Pod", service.namespace), f"{labels.SERVICE}={service.name}")
        mine = [
            pod for pod in pods if labels.JOB_NAME in pod["metadata"].get("labels", {}) and owned(pod, uid)
        ]
        for pod in mine:
            if (result := result_of(pod)) is not None:
                now = stamp(datetime.now(UTC))
                total, revision = int(result.get("bytes", 0)), str(result.get("revision", ""))
                return replace(start, revision=revision, total=total, done=total, cached=now)
        live = [pod for pod in mine if "deletionTimestamp" not in pod["metadata"]]
        go_on = [pod for pod in live if pod.get("status", {}).get("phase") != "Failed"]
        waits = ""
        if go_on:
            self._podless.pop(key, None)
        elif job is not None:
            waits = await self._podless_job(key, job)
        if not live:
            return replace(start, waits=waits or "its pod is being made")
        pod = max(go_on or live, key=lambda pod: pod["metadata"].get("creationTimestamp", ""))
        return read(pod, await self._progress(pod), start)

    async def _podless_job(self, key: Key, job: Mapping[str, Any]) -> str:
        """Why a Job has no pod that goes on; empty while that is nothing to speak of.

        Its controller says so in events alone, which the operator may not read. But it may make pods: so it
        asks the API server whether it would take this one.

        Raises:
            Refused: it would not.
            KubeError: a webhook fails without which it takes none.
        """
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        if _has_ended(job) or "deletionTimestamp" in job["metadata"]:
            return "its Job has ended, and is made anew"
        if job["spec"].get("suspend"):
            return f"Job {name} is suspended: whoever did that has to let it go on"
        known, now = self._podless.get(key), time.monotonic()
        if known is None or known.uid != uid:
            self._podless[key] = _Podless(uid, now + PODLESS_SECONDS)
            return ""
        if now < known.ask:
            return known.says
        try:
            await self._kube.check(fetch_pod(job))
        except KubeError as error:
            failure = None if NO_DRY_RUN in str(error) else rejection(error)
            if failure is not None and failure.reason == "WebhookFailed":
                raise
            if failure is not None:
                raise Refused("FetchRejected", f"Job {name} gets no pod: {error}") from error
        says = f"Job {name} has no pod yet: kubectl describe job {name} -n {key.namespace} tells why"
        self._podless[key] = _Podless(uid, now + ASK_AGAIN_SECONDS, says)
        return says

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

    async def _claim_is_gone(self, service: InferenceService) -> bool:
        cache = service.access.cache
        if cache.mode != "PersistentVolumeClaim":
            return False
        return await self._kube.get(Ref("PersistentVolumeClaim", service.namespace, cache.claim)) is None

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
            if error.code in REJECTED:
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


def _has_ended(job: Mapping[str, Any]) -> bool:
    """Whether a Job makes no more pods."""
    status = job.get("status", {})
    return bool(status.get("succeeded")) or holds(status, "Failed")
