# SPDX-License-Identifier: Apache-2.0
"""Rejected fetch pods: a dry run finds the cause, because the Job controller reports it only in events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from live_service import Service
from marks import CONTROL_PLANE
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.errors import KubeError, Refused
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.metrics import Metrics
from mizzen_operator.model_cache import fetch
from mizzen_operator.model_cache.fetch import ModelFetcher
from mizzen_operator.resources.fetch_job import fetch_job

pytestmark = CONTROL_PLANE
CONFIG = OperatorConfig(engine_image="engine:1", gateway_image="gateway:1")
MODEL: dict[str, Any] = {
    "source": "hf://Qwen/Qwen3-0.6B@main",
    "cache": {"mode": "PersistentVolumeClaim", "claimName": "weights", "size": "10Gi"},
}
RESULT = {"result": {"revision": "0123456789abcdef0123456789abcdef01234567", "bytes": 1000, "files": 3}}


def test_a_fetch_whose_pod_is_rejected_reports_why(
    live_service: Callable[..., Service], api: Any, node: Any, namespace: str
) -> None:
    limits = f"/api/v1/namespaces/{namespace}/limitranges"
    body = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small", "namespace": namespace}}
    limit = {"type": "Container", "max": {"memory": "1Gi"}}  # the fetch container has a limit of 2 Gi
    api.request("POST", limits, {**body, "spec": {"limits": [limit]}})
    node.behaviour.fetches[namespace] = RESULT
    demo = live_service(model=MODEL)
    demo.eventually(lambda: demo.condition("Failed")["reason"] == "FetchRejected", 60)
    [job] = api.list("Job", namespace)
    for condition in ("Failed", "ModelCached", "Ready"):
        words = demo.condition(condition)["message"]
        assert f"Job {job['metadata']['name']} gets no pod" in words, words
        assert "maximum memory usage per Container is 1Gi" in words, words
    assert demo.condition("ModelCached")["reason"] == "DownloadFailed"
    assert demo.condition("GatewayReady")["status"] == "True"
    api.request("DELETE", f"{limits}/small")
    demo.settle(1, 180)
    assert demo.condition("Failed")["status"] == "False"


class Cluster:
    """A fake API server with one Job, which has no pod yet; `refusal` makes dry runs of pods fail."""

    def __init__(self, job: dict[str, Any], refusal: KubeError | None) -> None:
        self.job, self.refusal = job, refusal
        self.dry_runs: list[dict[str, Any]] = []
        self.pods: list[dict[str, Any]] = []
        self.deleted: list[str] = []

    async def get(self, ref: ObjectRef) -> dict[str, Any]:
        return self.job if ref.kind == "Job" else {}

    async def list(self, ref: ObjectRef, selector: str) -> list[dict[str, Any]]:
        return self.pods if ref.kind == "Pod" else []

    async def delete(self, ref: ObjectRef, uid: str, propagation: str) -> bool:
        self.deleted.append(uid)
        return True

    async def dry_run_create(self, manifest: dict[str, Any]) -> None:
        self.dry_runs.append(manifest)
        if self.refusal is not None:
            raise self.refusal


def evicted_pod() -> dict[str, Any]:
    """Return an evicted pod of the Job."""
    return {
        "metadata": {
            "name": "demo-fetch-x",
            "labels": {"batch.kubernetes.io/job-name": "demo-fetch"},
            "ownerReferences": [{"uid": "job", "controller": True}],
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "status": {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."},
    }


Fetches = Callable[..., tuple[Callable[[], Any], Cluster]]


@pytest.fixture
def fetch_job_without_pod(
    service: Callable[..., InferenceService], monkeypatch: pytest.MonkeyPatch
) -> Fetches:
    def make(
        refusal: KubeError | None = None, seconds: float = 0.0, **spec: Any
    ) -> tuple[Callable[[], Any], Cluster]:
        monkeypatch.setattr(fetch, "PODLESS_SECONDS", seconds)
        demo = service(model=MODEL)
        job = fetch_job(demo, CONFIG)
        job["metadata"] |= {"uid": "job", "namespace": demo.namespace}
        job["spec"] |= spec
        cluster = Cluster(job, refusal)
        fetcher = ModelFetcher(cluster, CONFIG, Metrics())  # type: ignore[arg-type]
        return lambda: fetcher.sync(demo), cluster

    return make


async def test_a_new_job_has_time_to_create_its_pod(fetch_job_without_pod: Fetches) -> None:
    sync, cluster = fetch_job_without_pod(seconds=3600.0)
    for _ in range(2):
        assert (await sync()).describe() == "its pod is being created"
    assert not cluster.dry_runs


async def test_if_the_dry_run_passes_the_status_names_the_command_that_shows_the_cause(
    fetch_job_without_pod: Fetches,
) -> None:
    sync, cluster = fetch_job_without_pod()
    assert (await sync()).describe() == "its pod is being created"
    name = cluster.job["metadata"]["name"]
    words = f"Job {name} has no pod yet: kubectl describe job {name} -n default shows why"
    assert (await sync()).describe() == words
    [pod] = cluster.dry_runs
    assert pod["metadata"]["labels"]["batch.kubernetes.io/job-name"] == name
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "job"
    assert pod["spec"] == cluster.job["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    "refusal",
    [
        KubeError(400, "BadRequest", 'admission webhook "a.b" does not support dry run'),
        KubeError(0, "Unreachable", "timed out"),
        KubeError(429, "TooManyRequests", "later"),
    ],
)
async def test_an_error_that_says_nothing_about_the_pod_is_not_reported(
    fetch_job_without_pod: Fetches, refusal: KubeError
) -> None:
    sync, _ = fetch_job_without_pod(refusal)
    await sync()
    assert "has no pod yet" in (await sync()).describe()


async def test_a_rejection_of_the_pod_is_reported(fetch_job_without_pod: Fetches) -> None:
    sync, _ = fetch_job_without_pod(KubeError(403, "Forbidden", "exceeded quota: few"))
    await sync()
    with pytest.raises(Refused, match=r"gets no pod: .*exceeded quota: few") as refused:
        await sync()
    assert refused.value.reason == "FetchRejected"


@pytest.mark.parametrize(
    ("ending", "deleted"),
    [
        ({"status": {"succeeded": 1}}, True),
        ({"status": {"conditions": [{"type": "Failed", "status": "True"}]}}, True),
        ({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, False),
    ],
)
async def test_a_job_that_has_ended_is_created_again_without_a_dry_run(
    fetch_job_without_pod: Fetches, ending: dict[str, Any], deleted: bool
) -> None:
    """A dry run might fail for an unrelated reason, such as a quota that has been exhausted since."""
    sync, cluster = fetch_job_without_pod(KubeError(403, "Forbidden", "exceeded quota: few"))
    for part, fields in ending.items():
        cluster.job[part] = {**cluster.job.get(part, {}), **fields}
    for _ in range(2):
        assert (await sync()).describe() == "its Job has ended, and is created again"
    assert not cluster.dry_runs
    assert bool(cluster.deleted) is deleted


async def test_the_dry_run_is_not_repeated_at_each_reconcile(
    fetch_job_without_pod: Fetches, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, cluster = fetch_job_without_pod()
    await sync()
    first = (await sync()).describe()
    for _ in range(3):
        assert (await sync()).describe() == first
    assert len(cluster.dry_runs) == 1
    monkeypatch.setattr(fetch, "DRY_RUN_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(fetch.time, "monotonic", lambda: 1e12)
    for _ in range(2):
        await sync()
    assert len(cluster.dry_runs) == 3


async def test_a_rejected_successor_of_an_evicted_pod_is_reported(fetch_job_without_pod: Fetches) -> None:
    sync, cluster = fetch_job_without_pod(KubeError(403, "Forbidden", "exceeded quota: few"))
    cluster.pods = [evicted_pod()]
    await sync()
    with pytest.raises(Refused, match="exceeded quota: few"):
        await sync()


async def test_an_eviction_is_reported_until_there_is_another_pod(fetch_job_without_pod: Fetches) -> None:
    sync, cluster = fetch_job_without_pod()
    cluster.pods = [evicted_pod()]
    await sync()
    assert "low on memory" in (await sync()).describe()
    cluster.pods = [evicted_pod(), {**evicted_pod(), "status": {"phase": "Pending"}}]
    assert "low on memory" not in (await sync()).describe()


async def test_a_suspended_job_is_reported(fetch_job_without_pod: Fetches) -> None:
    sync, cluster = fetch_job_without_pod(suspend=True)
    assert "is suspended" in (await sync()).describe()
    assert not cluster.dry_runs
