# SPDX-License-Identifier: Apache-2.0
"""The children of a service are created and repaired; objects of other owners are left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from live_service import Service
from marks import CONTROL_PLANE
from mizzen_operator.resources.metadata import CONTAINER_SECURITY, POD_SECURITY

pytestmark = CONTROL_PLANE


@pytest.fixture
def service(live_service: Callable[..., Service]) -> Callable[..., Service]:
    return live_service


def test_a_suspended_service_keeps_its_gateway(service: Callable[..., Service]) -> None:
    demo = service()
    demo.settle(1)
    demo.patch(suspend=True)
    demo.eventually(lambda: not demo.pods())

    def gateway_args() -> list[str]:
        pods = demo.api.list("Pod", demo.namespace, "mizzen.dev/component=gateway")
        return [argument for pod in pods for argument in pod["spec"]["containers"][0]["args"]]

    demo.eventually(lambda: "--suspended" in gateway_args())
    demo.eventually(lambda: demo.condition("Ready")["reason"] == "Suspended")
    assert demo.condition("Available")["reason"] == "Suspended"
    assert demo.condition("Progressing")["status"] == "False"
    demo.patch(suspend=False)
    demo.settle(1)
    demo.eventually(lambda: "--suspended" not in gateway_args())


def test_deletion_leaves_no_object(service: Callable[..., Service], api: Any) -> None:
    demo = service()
    demo.settle(1)
    api.delete("InferenceService", demo.namespace, "demo")
    kinds = ("InferenceService", "Pod", "Deployment", "Service", "Secret", "RoleBinding")
    demo.eventually(lambda: not any(api.list(kind, demo.namespace) for kind in kinds), 90)
    accounts = [account["metadata"]["name"] for account in api.list("ServiceAccount", demo.namespace)]
    assert accounts in ([], ["default"])


def test_a_service_of_the_same_name_can_be_created_at_once(
    service: Callable[..., Service], api: Any, node: Any
) -> None:
    demo = service()
    demo.settle(1)
    node.behaviour.drain = 2.0
    body = demo.body()
    api.delete("InferenceService", demo.namespace, "demo")
    body["metadata"] = {"name": "demo", "namespace": demo.namespace}
    body.pop("status")
    api.create(body)
    demo.settle(1)


def test_drift_is_reverted(service: Callable[..., Service], api: Any) -> None:
    demo = service(gateway={"replicas": 1, "service": {"annotations": {"a": "b"}}})
    demo.settle(1)
    api.patch("Deployment", demo.namespace, "demo-gateway", {"spec": {"replicas": 5}})
    demo.eventually(lambda: api.get("Deployment", demo.namespace, "demo-gateway")["spec"]["replicas"] == 1)
    api.delete("Service", demo.namespace, "demo-gateway")
    demo.eventually(lambda: api.find("Service", demo.namespace, "demo-gateway"))
    assert api.get("Service", demo.namespace, "demo-gateway")["metadata"]["annotations"]["a"] == "b"
    demo.patch(gateway={"service": {"port": 80, "annotations": {"a": None}}})
    demo.eventually(
        lambda: api.get("Service", demo.namespace, "demo-gateway")["spec"]["ports"][0]["port"] == 80
    )
    assert "a" not in api.get("Service", demo.namespace, "demo-gateway")["metadata"]["annotations"]
    demo.eventually(lambda: demo.status()["url"].endswith(".svc:80/v1"))


@pytest.mark.parametrize("lost", ["demo-keys", "demo-engine-keys", "demo-gateway-keys"])
def test_a_deleted_unwatched_child_is_recreated_while_a_pod_may_need_it(
    service: Callable[..., Service], api: Any, node: Any, lost: str
) -> None:
    demo = service()
    demo.settle(1)
    before = api.get("Secret", demo.namespace, lost)["data"]
    api.delete("Secret", demo.namespace, lost)
    api.delete("ServiceAccount", demo.namespace, "demo-gateway")
    api.delete("RoleBinding", demo.namespace, "demo-gateway")
    node.behaviour.start = 3.0
    demo.patch(replicas=2)
    for kind in ("ServiceAccount", "RoleBinding"):
        demo.eventually(lambda kind=kind: api.find(kind, demo.namespace, "demo-gateway"))
    demo.eventually(lambda: api.find("Secret", demo.namespace, lost))
    assert api.get("Secret", demo.namespace, lost)["data"] == before
    demo.settle(2)


def test_gateways_with_outdated_keys_are_reported(
    service: Callable[..., Service], api: Any, node: Any
) -> None:
    demo = service()
    demo.settle(1)
    for name in ("demo-keys", "demo-engine-keys", "demo-gateway-keys"):
        api.delete("Secret", demo.namespace, name)
    node.behaviour.start = 3.0
    demo.patch(replicas=2)
    demo.eventually(lambda: demo.condition("Failed")["reason"] == "TokenRefused")
    assert "kubectl delete pods -l mizzen.dev/service=demo" in demo.condition("Failed")["message"]
    for pod in api.list("Pod", demo.namespace):
        api.delete("Pod", demo.namespace, pod["metadata"]["name"])
    demo.settle(2)


def test_an_object_of_another_owner_is_left_alone(
    service: Callable[..., Service], api: Any, namespace: str
) -> None:
    spec = {"ports": [{"port": 1}], "selector": {"app": "other"}}
    meta = {"name": "demo-gateway", "namespace": namespace}
    api.create({"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec})
    demo = service()
    demo.eventually(lambda: demo.condition("Failed")["status"] == "True")
    assert demo.condition("Failed")["reason"] == "NameTaken"
    assert "Service demo-gateway belongs to something else" in demo.condition("Failed")["message"]
    assert api.get("Service", namespace, "demo-gateway")["spec"]["selector"] == {"app": "other"}
    api.delete("Service", namespace, "demo-gateway")
    demo.settle(1)


def test_the_name_of_another_owners_pod_is_skipped(service: Callable[..., Service], api: Any) -> None:
    demo = service(replicas=0)
    demo.eventually(lambda: demo.condition("Ready")["reason"] == "ScaledToZero")
    name = f"demo-{demo.status()['updateRevision']}-0-0"
    container = {"name": "c", "image": "example/none", "securityContext": CONTAINER_SECURITY}
    spec = {"containers": [container], "securityContext": POD_SECURITY}
    metadata = {"name": name, "namespace": demo.namespace}
    api.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    demo.patch(replicas=1)
    demo.settle(1)
    assert demo.live() == [f"{name.removesuffix('-0')}-1"]
    assert "deletionTimestamp" not in api.get("Pod", demo.namespace, name)["metadata"]
    api.delete("Pod", demo.namespace, name, gracePeriodSeconds=0)


def test_the_rejection_of_a_pod_is_reported(service: Callable[..., Service]) -> None:
    demo = service(podTemplate={"volumes": [{"name": "data", "hostPath": {"path": "../x"}}]})
    demo.eventually(lambda: demo.condition("Failed")["reason"] == "PodRejected")
    assert "hostPath" in demo.condition("Failed")["message"]
    demo.patch(podTemplate={"volumes": []})
    demo.settle(1)
