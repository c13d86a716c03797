# SPDX-License-Identifier: Apache-2.0
"""Degraded mode: a service with an unusable spec keeps running, and its status reports the problem."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from live_service import Service
from marks import CONTROL_PLANE

pytestmark = CONTROL_PLANE
HERE = Path(__file__).parent
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    return yaml.safe_load((HERE.parents[2] / "crds/inferenceservices.yaml").read_text())


@pytest.fixture
def other_release(
    api: Any, ours: dict[str, Any], minimal: Callable[..., Any], eventually: Any
) -> Iterator[Callable[[], None]]:
    """Yield a function that installs another release's CRD; that CRD accepts any text as maxSurge."""
    probe = minimal("probe", rollout={"partition": 1})
    probe["metadata"]["namespace"] = "default"

    def install(crd: dict[str, Any]) -> None:
        api.apply_any(crd, CRDS)

        def served() -> bool:
            try:
                found = api.create(probe, dryRun="All")
            except Exception as error:  # for a moment after a change, the API server rejects all objects
                if getattr(error, "code", 0) not in (404, 429):
                    raise
                return False
            return ("partition" in found["spec"]["rollout"]) == ("partition" in _rollout(crd))

        eventually(served, expectation="the API server has the other CRD")

    def change() -> None:
        crd = copy.deepcopy(ours)
        del _properties(crd)["model"]["properties"]["parameters"]["pattern"]
        del _rollout(crd)["partition"]
        del _rollout(crd)["maxSurge"]["x-kubernetes-validations"]
        install(crd)

    yield change
    install(ours)


def _properties(crd: dict[str, Any]) -> dict[str, Any]:
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema["properties"]["spec"]["properties"]


def _rollout(crd: dict[str, Any]) -> dict[str, Any]:
    return _properties(crd)["rollout"]["properties"]


@pytest.fixture
def make(
    api: Any, node: Any, operators: Any, namespace: str, minimal: Callable[..., Any], eventually: Any
) -> Iterator[Callable[..., Any]]:
    names: list[str] = []

    def create(name: str = "demo", **spec: Any) -> Any:
        body = minimal(name, **{"engine": {"device": "CPU"}, "gateway": {"replicas": 1}, **spec})
        body["metadata"]["namespace"] = namespace
        names.append(name)
        api.create(body)
        return Service(api, node, namespace, eventually)

    yield create
    node.behaviour = type(node.behaviour)()
    for name in names:
        api.delete("InferenceService", namespace, name)


def has_condition(demo: Any, kind: str, status: str, reason: str) -> bool:
    """Return whether the condition `kind` has this status and reason, and is of the current generation."""
    found, generation = demo.condition(kind), demo.body()["metadata"]["generation"]
    return (found["status"], found["reason"], found.get("observedGeneration")) == (status, reason, generation)


def spoil(demo: Any, other_release: Callable[[], None]) -> None:
    """Make the stored service invalid in this release, and wait until the operator has reported it."""
    other_release()

    def met() -> bool:
        meta = {"annotations": {"time": str(time.monotonic())}}  # the watch may still be of the old CRD
        demo.api.patch("InferenceService", demo.namespace, "demo", {"metadata": meta})
        time.sleep(0.2)
        return demo.condition("Failed")["reason"] == "InvalidSpec"

    demo.eventually(met)


def test_a_spec_of_another_release_is_reported_and_its_pods_are_left_alone(
    make: Callable[..., Any], other_release: Callable[[], None], api: Any
) -> None:
    demo = make(replicas=2)
    demo.settle(2)
    pods = {pod["metadata"]["uid"] for pod in demo.pods()}
    spoil(demo, other_release)
    demo.patch(replicas=3)
    demo.eventually(lambda: has_condition(demo, "Failed", "True", "InvalidSpec"))
    words = demo.condition("Failed")["message"]
    assert words.startswith("spec.rollout.partition is missing; ") and "helm upgrade" in words
    status = demo.status()
    assert status["observedGeneration"] == demo.body()["metadata"]["generation"]
    assert (status["replicas"], status["availableReplicas"], status["updatedReplicas"]) == (2, 2, 0)
    for kind, truth, reason in (
        ("Ready", "False", "InvalidSpec"),
        ("Progressing", "False", "InvalidSpec"),
        ("Available", "True", "Serving"),
        ("GatewayReady", "True", "AllReplicasReady"),
        ("Scheduled", "True", "AllGroupsHaveNodes"),
    ):
        assert has_condition(demo, kind, truth, reason), demo.condition(kind)
    assert {pod["metadata"]["uid"] for pod in demo.pods()} == pods
    for name in demo.live():
        api.delete("Pod", demo.namespace, name)
    demo.eventually(lambda: has_condition(demo, "Available", "False", "NoGroupServes"))
    assert demo.status()["availableReplicas"] == 0
    demo.eventually(lambda: not demo.pods())

    def reported() -> list[str]:
        reasons = ("InvalidSpec", "NoGroupServes")
        return sorted(
            event["reason"] for event in api.list("Event", demo.namespace) if event["reason"] in reasons
        )

    demo.eventually(lambda: len(set(reported())) == 2, expectation="an Event is written after the status")
    assert reported() == ["InvalidSpec", "NoGroupServes"]


def test_the_service_recovers_with_the_crd(
    make: Callable[..., Any], other_release: Callable[[], None], ours: Any
) -> None:
    demo = make()
    demo.settle(1)
    spoil(demo, other_release)
    demo.patch(replicas=2)
    demo.eventually(lambda: has_condition(demo, "Failed", "True", "InvalidSpec"))
    demo.api.apply_any(ours, CRDS)
    demo.settle(2)
    assert has_condition(demo, "Failed", "False", "AsExpected")


def test_a_value_that_only_another_crd_accepts_is_reported_by_its_field(
    make: Callable[..., Any], other_release: Callable[[], None], ours: Any
) -> None:
    demo = make()
    demo.settle(1)
    other_release()
    demo.patch(rollout={"maxSurge": "lots"})
    demo.api.apply_any(ours, CRDS)
    words = "spec.rollout.maxSurge: 'lots' is not a percentage such as '25%'; "
    demo.eventually(lambda: demo.condition("Failed")["message"].startswith(words))
    assert has_condition(demo, "Available", "True", "Serving") and len(demo.live()) == 1
    demo.patch(rollout={"maxSurge": 1})
    demo.settle(1)


def test_an_error_of_the_operator_on_a_value_is_reported(
    make: Callable[..., Any], other_release: Callable[[], None], ours: Any, operators: Any
) -> None:
    demo = make(engine={"device": "CUDA"})
    operators.expected_errors.add(demo.namespace)
    demo.settle(1)
    other_release()
    demo.patch(model={"parameters": "many"}, accelerator={"memory": "80Gi"})
    demo.api.apply_any(ours, CRDS)

    def reported() -> bool:  # at first, a reconcile may still see the object in the form of the other CRD
        words = demo.condition("Failed")["message"]
        return has_condition(demo, "Failed", "True", "OperatorError") and "ValueError" in words

    demo.eventually(reported)
    assert has_condition(demo, "Available", "True", "Serving") and len(demo.live()) == 1
    demo.patch(model={"parameters": "1B"})
    demo.settle(1)


def test_a_group_that_no_gateway_reaches_is_reported(
    make: Callable[..., Any], other_release: Callable[[], None], node: Any
) -> None:
    demo = make()
    demo.settle(1)
    spoil(demo, other_release)
    uid = demo.pods()[0]["metadata"]["uid"]
    node.behaviour.unreachable.add(uid)  # its pod is ready; the gateway has lost it
    demo.eventually(lambda: has_condition(demo, "Available", "False", "NoGroupServes"))
    node.behaviour.unreachable.clear()
    demo.eventually(lambda: has_condition(demo, "Available", "True", "Serving"))


def test_a_shared_gateway_keeps_serving_a_service_with_an_invalid_spec(
    make: Callable[..., Any], other_release: Callable[[], None], api: Any, node: Any, ours: Any
) -> None:
    """While the spec of one service is invalid, the gateway keeps its configuration and serves both."""
    shared = {"mode": "Shared", "replicas": 1}
    demo = make(gateway=shared)
    demo.settle(1)
    make("other", gateway={**shared, "replicas": 2})

    def get_service(name: str) -> dict[str, Any]:
        return api.get("InferenceService", demo.namespace, name)

    demo.eventually(lambda: get_service("other").get("status", {}).get("availableReplicas") == 1)

    def files() -> tuple[object, object]:
        config = api.get("ConfigMap", demo.namespace, "mizzen-shared")
        return config["data"], config["metadata"]["ownerReferences"]

    before = files()
    other_release()
    demo.patch(rollout={"maxSurge": "lots"})
    api.apply_any(ours, CRDS)
    demo.eventually(lambda: has_condition(demo, "Failed", "True", "InvalidSpec"))
    api.patch("InferenceService", demo.namespace, "other", {"spec": {"replicas": 2}})
    demo.eventually(lambda: get_service("other")["status"]["availableReplicas"] == 2)
    assert files() == before
    assert api.get("Deployment", demo.namespace, "mizzen-shared")["spec"]["replicas"] == 1
    assert has_condition(demo, "Available", "True", "Serving")
    failed = {c["type"]: c for c in get_service("other")["status"]["conditions"]}["Failed"]
    assert failed["status"] == "False", failed
    api.patch("InferenceService", demo.namespace, "other", {"spec": {"model": {"aliases": ["more"]}}})

    def waits() -> bool:
        found = {c["type"]: c for c in get_service("other")["status"]["conditions"]}["Failed"]
        return found["reason"] == "NeighbourInvalid" and "demo" in found["message"]

    demo.eventually(waits)
    assert files() == before
    demo.patch(rollout={"maxSurge": 1})
    demo.eventually(lambda: "more" in str(files()[0]))
