"""What a service says of a fetch whose Job gets no pod: its controller tells of that in events alone."""

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


def test_a_fetch_whose_pod_the_cluster_refuses_says_why(
    live_service: Callable[..., Service], api: Any, node: Any, namespace: str
) -> None:
    limits = f"/api/v1/namespaces/{namespace}/limitranges"
    body = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small", "namespace": namespace}}
    limit = {"type": "Container", "max": {"memory": "1Gi"}}  # a fetch may take 2
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
    """A Job without a pod, and what the API server says of such a pod."""

    def __init__(self, job: dict[str, Any], refusal: KubeError | None) -> None:
        self.job, self.refusal = job, refusal
        self.asked: list[dict[str, Any]] = []
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
        self.asked.append(manifest)
        if self.refusal is not None:
            raise self.refusal


def evicted_pod() -> dict[str, Any]:
    """A pod of the Job that its node has ended."""
    return {
        "metadata": {
            "name": "demo-fetch-x",
            "labels": {"batch.kubernetes.io/job-name": "demo-fetch"},
            "ownerReferences": [{"uid": "job", "controller": True}],
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "status": {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."},
    }


Looks = Callable[..., tuple[ModelFetcher, Cluster]]


@pytest.fixture
def looks(service: Callable[..., InferenceService], monkeypatch: pytest.MonkeyPatch) -> Looks:
    def make(
        refusal: KubeError | None = None, seconds: float = 0.0, **spec: Any
    ) -> tuple[Callable[[], Any], Cluster]:
        monkeypatch.setattr(fetch, "PODLESS_SECONDS", seconds)
        one = service(model=MODEL)
        job = fetch_job(one, CONFIG)
        job["metadata"] |= {"uid": "job", "namespace": one.namespace}
        job["spec"] |= spec
        cluster = Cluster(job, refusal)
        fetches = ModelFetcher(cluster, CONFIG, Metrics())  # type: ignore[arg-type]
        return lambda: fetches.sync(one), cluster

    return make


async def test_a_job_is_given_time_to_make_its_pod(looks: Looks) -> None:
    sync, cluster = looks(seconds=3600.0)
    for _ in range(2):
        assert (await sync()).words() == "its pod is being made"
    assert not cluster.asked


async def test_where_nothing_refuses_the_pod_the_status_says_where_to_look(looks: Looks) -> None:
    sync, cluster = looks()
    assert (await sync()).words() == "its pod is being made"
    name = cluster.job["metadata"]["name"]
    words = f"Job {name} has no pod yet: kubectl describe job {name} -n default tells why"
    assert (await sync()).words() == words
    [pod] = cluster.asked
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
async def test_what_says_nothing_of_the_pod_is_not_told(looks: Looks, refusal: KubeError) -> None:
    sync, _ = looks(refusal)
    await sync()
    assert "has no pod yet" in (await sync()).words()


async def test_what_refuses_the_pod_is_told(looks: Looks) -> None:
    sync, _ = looks(KubeError(403, "Forbidden", "exceeded quota: few"))
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
async def test_a_job_that_makes_no_more_pods_is_made_anew_and_not_asked_about(
    looks: Looks, ending: dict[str, Any], deleted: bool
) -> None:
    """A quota that is full by then has refused nothing."""
    sync, cluster = looks(KubeError(403, "Forbidden", "exceeded quota: few"))
    for part, fields in ending.items():
        cluster.job[part] = {**cluster.job.get(part, {}), **fields}
    for _ in range(2):
        assert (await sync()).words() == "its Job has ended, and is made anew"
    assert not cluster.asked
    assert bool(cluster.deleted) is deleted


async def test_a_pod_is_not_asked_about_at_each_look(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, cluster = looks()
    await sync()
    first = (await sync()).words()
    for _ in range(3):
        assert (await sync()).words() == first
    assert len(cluster.asked) == 1
    monkeypatch.setattr(fetch, "ASK_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(fetch.time, "monotonic", lambda: 1e12)
    for _ in range(2):
        await sync()
    assert len(cluster.asked) == 3


async def test_a_pod_that_was_evicted_and_whose_successor_is_refused_says_why(looks: Looks) -> None:
    sync, cluster = looks(KubeError(403, "Forbidden", "exceeded quota: few"))
    cluster.pods = [evicted_pod()]
    await sync()
    with pytest.raises(Refused, match="exceeded quota: few"):
        await sync()


async def test_a_pod_that_was_evicted_says_so_until_there_is_another(looks: Looks) -> None:
    sync, cluster = looks()
    cluster.pods = [evicted_pod()]
    await sync()
    assert "low on memory" in (await sync()).words()
    cluster.pods = [evicted_pod(), {**evicted_pod(), "status": {"phase": "Pending"}}]
    assert "low on memory" not in (await sync()).words()


async def test_a_job_that_somebody_has_suspended_says_so(looks: Looks) -> None:
    sync, cluster = looks(suspend=True)
    assert "is suspended" in (await sync()).words()
    assert not cluster.asked
