# SPDX-License-Identifier: Apache-2.0
"""Models that are fetched before engines start: a real API server and Job controller, with simulated pods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from marks import CONTROL_PLANE
from mizzen_operator.api.types import InferenceService

pytestmark = CONTROL_PLANE
COMMIT = "0123456789abcdef0123456789abcdef01234567"
RESULT = {"result": {"revision": COMMIT, "bytes": 1000, "files": 3}}
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


class Fetched:
    """A service whose model is fetched, and its simulated fetch."""

    def __init__(self, api: Any, node: Any, namespace: str, eventually: Callable[..., Any]) -> None:
        self.api, self.node, self.namespace, self.eventually = api, node, namespace, eventually

    def show(self, **progress: Any) -> None:
        """Set the progress that the simulated fetch reports from now on."""
        self.node.behaviour.fetches[self.namespace] = progress

    def body(self) -> dict[str, Any]:
        return self.api.get("InferenceService", self.namespace, "demo")

    def status(self) -> dict[str, Any]:
        return self.body().get("status", {})

    def model(self) -> dict[str, Any]:
        return self.status().get("model", {})

    def has_condition(self, condition: str, status: str, reason: str) -> bool:
        found = [c for c in self.status().get("conditions", []) if c["type"] == condition]
        return bool(found) and (found[0]["status"], found[0]["reason"]) == (status, reason)

    def becomes(self, condition: str, status: str, reason: str) -> None:
        self.eventually(
            lambda: self.has_condition(condition, status, reason), 120, f"{condition} {status} {reason}"
        )

    def message(self, condition: str) -> str:
        return next(c["message"] for c in self.status()["conditions"] if c["type"] == condition)

    def patch(self, **spec: Any) -> None:
        self.api.patch("InferenceService", self.namespace, "demo", {"spec": spec})

    def pods(self, component: str = "engine") -> list[dict[str, Any]]:
        return self.api.list("Pod", self.namespace, f"mizzen.dev/component={component}")

    def jobs(self) -> list[dict[str, Any]]:
        return [j for j in self.api.list("Job", self.namespace) if "deletionTimestamp" not in j["metadata"]]

    def settled(self, groups: int) -> bool:
        body = self.body()
        status = body.get("status", {})
        return (
            self.has_condition("Ready", "True", "AllGroupsServing")
            and status["observedGeneration"] == body["metadata"]["generation"]
            and status["availableReplicas"] == len(self.pods()) == groups
        )

    def settle(self, groups: int) -> None:
        self.eventually(lambda: self.settled(groups), 120, f"{groups} groups")


@pytest.fixture
def fetched(
    api: Any, node: Any, operators: Any, namespace: str, minimal: Callable[..., Any], eventually: Any
) -> Iterator[Callable[..., Fetched]]:
    def make(progress: dict[str, Any], **spec: Any) -> Fetched:
        fields = {"engine": {"device": "CPU"}, "gateway": {"replicas": 1}, "model": MODEL, **spec}
        body = minimal(**fields)
        body["metadata"]["namespace"] = namespace
        demo = Fetched(api, node, namespace, eventually)
        demo.show(**progress)
        api.create(body)
        return demo

    yield make
    node.behaviour = type(node.behaviour)()
    api.delete("InferenceService", namespace, "demo")


def test_a_fetch_without_its_credentials_names_the_secret_and_the_field(
    fetched: Callable[..., Fetched], node: Any, api: Any, namespace: str
) -> None:
    node.behaviour.mounting.add(namespace)
    demo = fetched(RESULT)
    demo.becomes("Failed", "True", "ReferenceMissing")
    assert "Secret hub does not exist" in demo.message("Failed")
    assert "spec.model.credentialsSecretRef.name" in demo.message("Ready")
    metadata = {"name": "hub", "namespace": namespace}
    api.create(
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"token": "hf_0123456789"}}
    )
    demo.settle(1)
    assert demo.has_condition("Failed", "False", "AsExpected")


def test_a_model_is_fetched_once_and_then_served(fetched: Callable[..., Fetched], api: Any) -> None:
    demo = fetched({"progress": DOWNLOADING})
    demo.eventually(lambda: demo.model().get("downloadPercent") == 25, 120, "a quarter is there")
    model = demo.model()
    assert (model["totalBytes"], model["fetchedBytes"]) == (1000, 250)
    assert (model["bytesPerSecond"], model["secondsLeft"]) == (50, 15)
    assert model["resolvedRevision"] == COMMIT and model["source"] == MODEL["source"]
    assert demo.has_condition("ModelCached", "False", "Downloading") and demo.has_condition(
        "Ready", "False", "Downloading"
    )
    assert demo.has_condition("Progressing", "True", "Downloading") and demo.has_condition(
        "Failed", "False", "AsExpected"
    )
    assert "25 % of 1000 bytes" in demo.message("ModelCached") and not demo.pods()
    claim = api.get("PersistentVolumeClaim", demo.namespace, "weights")
    assert claim["spec"]["resources"]["requests"] == {"storage": "10Gi"}
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"] and "ownerReferences" not in claim["metadata"]

    demo.show(**RESULT)
    demo.settle(1)
    model = demo.model()
    assert (model["downloadPercent"], model["resolvedRevision"]) == (100, COMMIT)
    assert "cachedTime" in model and "secondsLeft" not in model
    assert demo.has_condition("ModelCached", "True", "RevisionPinned") and COMMIT in demo.message(
        "ModelCached"
    )
    [pod] = demo.pods()
    [container] = pod["spec"]["containers"]
    assert f"/mnt/mizzen/model/{model['folder']}" in container["args"]
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert mounts["mizzen-model"]["readOnly"] is True and "mizzen-credentials" not in mounts

    [job] = demo.jobs()
    names = [name for name in demo.node.names if f"{demo.namespace}/demo-fetch-" in name]
    api.delete("Job", demo.namespace, job["metadata"]["name"], propagationPolicy="Background")
    demo.patch(replicas=2)
    demo.settle(2)
    assert not demo.jobs()
    assert [name for name in demo.node.names if f"{demo.namespace}/demo-fetch-" in name] == names


def test_a_fetched_model_that_cannot_fit_gets_no_pod(fetched: Callable[..., Fetched]) -> None:
    sizes = {"parameters": 8190735360, "dtype": "bfloat16"}
    demo = fetched(
        {"result": {**RESULT["result"], **sizes}}, engine={"device": "CUDA"}, accelerator={"memory": "16Gi"}
    )
    demo.becomes("Failed", "True", "WillNotFit")
    assert "8.19B parameters on 1 GPU need at least 15.5 GiB of each" in demo.message("Scheduled")
    assert (demo.model()["parameters"], demo.model()["dtype"]) == (8190735360, "bfloat16")
    assert not demo.pods()
    demo.patch(accelerator={"memory": "24Gi"})
    demo.settle(1)


def test_a_fetch_ends_although_its_pod_has_a_sidecar(
    fetched: Callable[..., Fetched], node: Any, namespace: str
) -> None:
    node.behaviour.sidecars.add(namespace)
    demo = fetched({"progress": DOWNLOADING})
    demo.eventually(lambda: demo.model().get("downloadPercent") == 25, 120, "a quarter is there")
    demo.show(**RESULT)
    demo.eventually(lambda: not demo.pods("fetch") and not demo.jobs(), 60, "the Job and its pod are gone")
    demo.settle(1)
    assert demo.has_condition("ModelCached", "True", "RevisionPinned")
    names = [name for name in node.names if f"{demo.namespace}/demo-fetch-" in name]
    assert len(names) == 1, "the model is not fetched again"


def test_old_groups_serve_while_the_next_model_is_downloading(
    fetched: Callable[..., Fetched], node: Any
) -> None:
    demo = fetched(RESULT, replicas=2, rollout={"maxSurge": 0, "maxUnavailable": 1})
    demo.settle(2)
    old = {pod["metadata"]["uid"] for pod in demo.pods()}
    first = demo.model()["folder"]
    demo.show(progress=DOWNLOADING)
    demo.patch(model={"source": "hf://Qwen/Qwen3-1.7B@main"})
    demo.eventually(lambda: demo.model().get("downloadPercent") == 25, 120, "the next model is downloading")
    assert demo.has_condition("Available", "True", "Serving") and demo.has_condition(
        "Ready", "False", "Downloading"
    )
    assert {pod["metadata"]["uid"] for pod in demo.pods()} == old
    demo.node.reset_lowest(demo.namespace)
    demo.show(**RESULT)
    demo.settle(2)
    assert demo.node.lowest.pop(demo.namespace) >= 1 and demo.model()["folder"] != first
    assert not old & {pod["metadata"]["uid"] for pod in demo.pods()}


def test_a_reverted_model_ends_the_fetch_and_keeps_the_groups(fetched: Callable[..., Fetched]) -> None:
    demo = fetched(RESULT)
    demo.settle(1)
    old = {pod["metadata"]["uid"] for pod in demo.pods()}
    demo.show(progress=DOWNLOADING)
    demo.patch(model={"source": "hf://Qwen/Qwen3-1.7B@main"})
    demo.becomes("ModelCached", "False", "Downloading")
    demo.show(**RESULT)  # the folder of the previous model is complete
    demo.patch(model={"source": MODEL["source"]})
    demo.settle(1)
    assert {pod["metadata"]["uid"] for pod in demo.pods()} == old
    demo.eventually(lambda: len(demo.jobs()) == 1, 60, "one Job is left")


def test_a_failed_fetch_reports_why_and_recovers(fetched: Callable[..., Fetched]) -> None:
    demo = fetched({"error": "hf://Qwen/Qwen3-0.6B@main is refused (401): give a token"})
    demo.becomes("ModelCached", "False", "DownloadFailed")
    assert demo.has_condition("Failed", "True", "DownloadFailed") and demo.has_condition(
        "Ready", "False", "DownloadFailed"
    )
    assert "give a token; retrying" in demo.message("Failed") and not demo.pods()
    demo.show(progress=DOWNLOADING)
    demo.becomes("ModelCached", "False", "Downloading")
    demo.becomes("Failed", "False", "AsExpected")
    demo.show(**RESULT)
    demo.settle(1)


def test_a_model_whose_claim_was_deleted_at_zero_replicas_is_fetched_again(
    fetched: Callable[..., Fetched], api: Any
) -> None:
    demo = fetched(RESULT)
    demo.settle(1)
    demo.patch(replicas=0)
    demo.eventually(lambda: not demo.pods(), 60, "nothing runs")
    before = api.get("PersistentVolumeClaim", demo.namespace, "weights")["metadata"]["uid"]
    for job in demo.jobs():  # the Job's ended pod would keep the claim from being deleted
        api.delete("Job", demo.namespace, job["metadata"]["name"], propagationPolicy="Background")
    api.delete("PersistentVolumeClaim", demo.namespace, "weights")
    demo.eventually(lambda: api.find("PersistentVolumeClaim", demo.namespace, "weights") is None, 60)
    demo.show(progress=DOWNLOADING)
    demo.patch(replicas=1)
    demo.becomes("ModelCached", "False", "Downloading")
    demo.eventually(lambda: demo.model().get("downloadPercent") == 25, 60, "it is downloading again")
    assert api.get("PersistentVolumeClaim", demo.namespace, "weights")["metadata"]["uid"] != before
    assert not demo.pods()
    demo.show(**RESULT)
    demo.settle(1)


Make = Callable[..., InferenceService]


@pytest.fixture
def service(service: Make) -> Make:
    def make(model: dict[str, Any] | None = None, **spec: Any) -> InferenceService:
        return service(model={**MODEL, **(model or {})}, **spec)

    return make
