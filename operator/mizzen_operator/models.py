"""Brings a service's model into its cache by a Job, and says how far it is.

The Job's pod tells it all: its termination message the result or the failure, its `/progress` the bytes. Once
the status says that the model is there, nothing is asked any more: no Job is read, and none is made again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import aiohttp

from mizzen_operator import labels
from mizzen_operator.api import InferenceService
from mizzen_operator.apply import Refused, name_taken
from mizzen_operator.config import OperatorConfig
from mizzen_operator.download import Download, begun, finished, read, result_of, worth_telling
from mizzen_operator.kube import Kube, KubeError, Ref
from mizzen_operator.memory import stamp
from mizzen_operator.metrics import Metrics
from mizzen_operator.observe import owned
from mizzen_operator.queue import Key
from mizzen_operator.render.model import cache_claim, fetch_job

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""How often progress is asked for."""
_ASK_SECONDS = 2.0
_MAX_ANSWER = 64 * 1024
JOB_NAME = "batch.kubernetes.io/job-name"


class Models:
    """The fetches of all services."""

    def __init__(self, kube: Kube, config: OperatorConfig, metrics: Metrics) -> None:
        self._kube = kube
        self._config = config
        self._metrics = metrics
        self._said: dict[Key, tuple[Download, float]] = {}
        """What the status says of each download that is under way, and since when."""

    def told(self, key: Key, download: Download | None) -> Download | None:
        """A download as the status should tell of it: what it says already, while little has come since."""
        if download is None or download.cached:
            self._said.pop(key, None)
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
            raise name_taken({"kind": "Job", "metadata": {"name": name}})
        download = await self._look(service, live)
        done = (live or {}).get("status", {}).get("succeeded", 0)
        if (
            done and not download.cached
        ):  # its pod is gone, and with it what it said: the next one finds all there
            await self._delete(live or job)
        if download.cached:
            await self._remove(service, kept=name)
        return download

    async def _look(self, service: InferenceService, job: Mapping[str, Any] | None) -> Download:
        """What the pods of a Job say; of a former one of its name they say nothing of what is there now."""
        start, uid = begun(service), job["metadata"]["uid"] if job is not None else ""
        pods = await self._kube.list(Ref("Pod", service.namespace), f"{labels.SERVICE}={service.name}")
        mine = [pod for pod in pods if JOB_NAME in pod["metadata"].get("labels", {}) and owned(pod, uid)]
        for pod in mine:
            if (result := result_of(pod)) is not None:
                now = stamp(datetime.now(UTC))
                total, revision = int(result.get("bytes", 0)), str(result.get("revision", ""))
                return replace(start, revision=revision, total=total, done=total, cached=now)
        live = [pod for pod in mine if "deletionTimestamp" not in pod["metadata"]]
        if not live:
            return replace(start, waits="its pod is being made")
        pod = max(live, key=lambda pod: pod["metadata"].get("creationTimestamp", ""))
        return read(pod, await self._progress(pod), start)

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
