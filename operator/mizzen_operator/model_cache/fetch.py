# SPDX-License-Identifier: Apache-2.0
"""Fetches a service's model into its cache by a Job, and reads the progress of the download.

The Job's pod reports everything: its endpoint `/progress` returns the number of bytes fetched so far, and its
termination message contains the result or the error. Once the status says that the model is cached, no Job is
read or created again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import aiohttp

from mizzen_operator.api import labels, reasons
from mizzen_operator.api.addresses import join_address
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.apply import name_taken_error
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import REJECTION_CODES, KubeError, Refused, rejection
from mizzen_operator.kube.objects import is_condition_true, is_owned_by, timestamp
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.metrics import Metrics
from mizzen_operator.model_cache.progress import (
    Download,
    fetch_containers,
    finish_download,
    is_kept_by_sidecar,
    load_finished_download,
    new_download,
    read_progress,
    read_result,
    should_report,
)
from mizzen_operator.resources.fetch_job import cache_claim, fetch_job, fetch_pod

POLL_SECONDS = 5.0
"""Time between two requests for the progress."""
_REQUEST_SECONDS = 2.0
_MAX_ANSWER = 64 * 1024
"""Maximum size of a response to `/progress`, in bytes."""
NO_DRY_RUN = "does not support dry run"
"""Part of the API server's error message if a webhook must not be called in a dry run."""
PODLESS_SECONDS = 10.0
"""Time for which a Job may lack a pod before a dry run checks whether the API server accepts its pod."""
DRY_RUN_AGAIN_SECONDS = 60.0
"""Time between two dry runs: each costs a write to the API server and calls of its webhooks."""


@dataclass(frozen=True, slots=True)
class _PodlessJob:
    """A Job without a running pod.

    Attributes:
        uid: uid of the Job.
        next_dry_run: monotonic time of the next dry run of its pod.
        message: message that the status shows until that time.
    """

    uid: str
    next_dry_run: float
    message: str = ""


class ModelFetcher:
    """Fetches the models of all services."""

    def __init__(self, kube: KubeClient, config: OperatorConfig, metrics: Metrics) -> None:
        self._kube = kube
        self._config = config
        self._metrics = metrics
        self._reported: dict[ServiceKey, tuple[Download, float]] = {}
        """Each running download as the status reports it, with the monotonic time of the report."""
        self._podless: dict[ServiceKey, _PodlessJob] = {}

    def reported_download(self, key: ServiceKey, download: Download | None) -> Download | None:
        """Return the download that the status should show.

        While a download runs, the status keeps the last report until `should_report` allows a new one.
        """
        if download is None or download.cached_time:
            self.forget(key)
            return download
        reported, since = self._reported.get(key, (None, 0.0))
        if reported is not None and not should_report(reported, download, time.monotonic() - since):
            return reported
        self._reported[key] = (download, time.monotonic())
        return download

    def forget(self, key: ServiceKey) -> None:
        """Drop the state that is kept for a service's download."""
        self._reported.pop(key, None)
        self._podless.pop(key, None)

    async def sync(self, service: InferenceService, *, unused: bool = False) -> Download | None:
        """Create the Job that fetches a service's model, if one is needed; return the download.

        Args:
            service: the service.
            unused: whether no pod mounts the cache, so that its claim may have been deleted.

        Returns:
            The download with its progress; None if the service uses no cache.

        Raises:
            Refused: a required object's name belongs to something else, or the object cannot be created.
            KubeError: the API server failed.
        """
        if not service.access.cached:
            if service.status.get("model", {}).get("place"):
                await self._delete_jobs(service, keep="")
            return None
        if (finished := load_finished_download(service)) is not None:
            if not (unused and service.groups and await self._is_claim_missing(service)):
                await self._end_finished_jobs(service)
                return finished
            await self._delete_jobs(service, keep="")
            return new_download(service, waiting_for="its claim is gone: the model is fetched again")
        if service.suspend:
            return new_download(service, waiting_for="spec.suspend is true")
        await self._ensure_claim(service)
        job = fetch_job(service, self._config)
        name = job["metadata"]["name"]
        live = await self._kube.get(ObjectRef("Job", service.namespace, name))
        if live is None:
            await self._delete_jobs(service, keep=name)
            await self._create(job)
        elif not is_owned_by(live, service.uid):
            raise name_taken_error({**live, "kind": "Job"}, service.name)
        download = await self._read_download(service, live)
        if live is not None and not download.cached_time and await self._has_lost_result(service, live):
            # The pod was deleted before its result was read. The next Job finds the model complete.
            await self._delete(live)
        elif download.cached_time:
            await self._delete_jobs(service, keep=name)
        return download

    async def _end_finished_jobs(self, service: InferenceService) -> None:
        """Delete fetch Jobs that have fetched the model, but do not end.

        A Job ends only once all containers of its pod have ended. A sidecar that admission has injected runs
        on, and the pod keeps the cache mounted. The status contains the result already, so the Job is not
        needed.
        """
        for pod in await self._list_pods(service):
            owners = pod["metadata"].get("ownerReferences", [])
            jobs = [owner for owner in owners if owner["kind"] == "Job" and owner.get("controller")]
            if not (jobs and is_kept_by_sidecar(pod)):
                continue
            job = await self._kube.get(ObjectRef("Job", service.namespace, jobs[0]["name"]))
            if job is not None and job["metadata"]["uid"] == jobs[0]["uid"] and is_owned_by(job, service.uid):
                await self._delete(job)

    async def _list_pods(self, service: InferenceService) -> list[dict[str, Any]]:
        """Return the pods of a service's fetch Jobs."""
        pods = await self._kube.list(ObjectRef("Pod", service.namespace), f"{labels.SERVICE}={service.name}")
        return [pod for pod in pods if labels.JOB_NAME in pod["metadata"].get("labels", {})]

    async def _has_lost_result(self, service: InferenceService, job: Mapping[str, Any]) -> bool:
        """Return whether a Job whose result could not be read has nothing left to do."""
        if _has_ended(job):
            return True
        pods = await self._list_pods(service)
        return any(is_owned_by(pod, job["metadata"]["uid"]) and is_kept_by_sidecar(pod) for pod in pods)

    async def _read_download(self, service: InferenceService, job: Mapping[str, Any] | None) -> Download:
        """Read the progress from a Job's pods; ignore pods of an earlier Job with the same name."""
        key, download = ServiceKey(service.namespace, service.name), new_download(service)
        uid = job["metadata"]["uid"] if job is not None else ""
        fetching = [pod for pod in await self._list_pods(service) if is_owned_by(pod, uid)]
        for pod in fetching:
            if (result := read_result(pod)) is not None:
                return finish_download(download, result, timestamp(datetime.now(UTC)))
        live = [pod for pod in fetching if "deletionTimestamp" not in pod["metadata"]]
        running = [pod for pod in live if pod.get("status", {}).get("phase") != "Failed"]
        message = ""
        if running:
            self._podless.pop(key, None)
        elif job is not None:
            message = await self._explain_podless_job(key, job)
        if not live:
            return replace(download, waiting_for=message or "its pod is being created")
        pod = max(running or live, key=lambda pod: pod["metadata"].get("creationTimestamp", ""))
        return read_progress(pod, await self._request_progress(pod), download)

    async def _explain_podless_job(self, key: ServiceKey, job: Mapping[str, Any]) -> str:
        """Return why a Job has no running pod; empty during the first PODLESS_SECONDS.

        The Job controller reports the cause only by Events, which the operator may not read. But the operator
        may create pods, so it checks by a dry run whether the API server would accept the Job's pod.

        Raises:
            Refused: the API server rejects the pod.
            KubeError: a required admission webhook fails.
        """
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        if _has_ended(job) or "deletionTimestamp" in job["metadata"]:
            return "its Job has ended, and is created again"
        if job["spec"].get("suspend"):
            return f"Job {name} is suspended, not by the operator: set its spec.suspend to false"
        podless, now = self._podless.get(key), time.monotonic()
        if podless is None or podless.uid != uid:
            self._podless[key] = _PodlessJob(uid, now + PODLESS_SECONDS)
            return ""
        if now < podless.next_dry_run:
            return podless.message
        try:
            await self._kube.dry_run_create(fetch_pod(job))
        except KubeError as error:
            failure = None if NO_DRY_RUN in str(error) else rejection(error)
            if failure is not None and failure.reason == reasons.WEBHOOK_FAILED:
                raise
            if failure is not None:
                raise Refused(reasons.FETCH_REJECTED, f"Job {name} gets no pod: {error}") from error
        message = f"Job {name} has no pod yet: kubectl describe job {name} -n {key.namespace} shows why"
        self._podless[key] = _PodlessJob(uid, now + DRY_RUN_AGAIN_SECONDS, message)
        return message

    async def _request_progress(self, pod: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a pod's response to `/progress`; empty if it does not respond."""
        status = pod.get("status", {})
        address = status.get("podIP", "")
        running = any("running" in container.get("state", {}) for container in fetch_containers(status))
        if not address or not running:
            return {}
        url = f"http://{join_address(address, labels.FETCH_PORT)}/progress"
        timeout = aiohttp.ClientTimeout(total=_REQUEST_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
                session.get(url, allow_redirects=False) as answer,
            ):
                body = json.loads(await answer.content.read(_MAX_ANSWER)) if answer.status == 200 else {}
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return {}
        return body if isinstance(body, dict) else {}

    async def _is_claim_missing(self, service: InferenceService) -> bool:
        cache = service.access.cache
        if cache.mode != "PersistentVolumeClaim":
            return False
        return (
            await self._kube.get(ObjectRef("PersistentVolumeClaim", service.namespace, cache.claim)) is None
        )

    async def _ensure_claim(self, service: InferenceService) -> None:
        """Create the cache's claim if it is missing; an existing claim is not changed."""
        claim = cache_claim(service)
        if claim is None:
            return
        ref = ObjectRef("PersistentVolumeClaim", service.namespace, claim["metadata"]["name"])
        if await self._kube.get(ref) is None:
            await self._create(claim)

    async def _create(self, manifest: dict[str, Any]) -> None:
        kind = manifest["kind"]
        try:
            if await self._kube.create(manifest):
                self._metrics.actions.labels(f"Create{kind}").inc()
        except KubeError as error:
            if error.code in REJECTION_CODES:
                reason = f"{kind}{reasons.REJECTED}"
                raise Refused(reason, f"the API server rejects the {kind}: {error}") from error
            raise

    async def _delete_jobs(self, service: InferenceService, *, keep: str) -> None:
        """Delete the service's fetch Jobs except the one named `keep`."""
        selector = f"{labels.SERVICE}={service.name},{labels.COMPONENT}={labels.FETCH}"
        for job in await self._kube.list(ObjectRef("Job", service.namespace), selector):
            if is_owned_by(job, service.uid) and job["metadata"]["name"] != keep:
                await self._delete(job)

    async def _delete(self, job: Mapping[str, Any]) -> None:
        meta = job["metadata"]
        if "uid" in meta:
            self._metrics.actions.labels("DeleteJob").inc()
            await self._kube.delete(
                ObjectRef("Job", meta["namespace"], meta["name"]), meta["uid"], "Background"
            )


def _has_ended(job: Mapping[str, Any]) -> bool:
    """Return whether a Job has succeeded or failed, after which it creates no more pods."""
    status = job.get("status", {})
    return bool(status.get("succeeded")) or is_condition_true(status, "Failed")
