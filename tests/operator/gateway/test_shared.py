# SPDX-License-Identifier: Apache-2.0
"""Services that share a gateway: the operator on a real API server and garbage collector."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from marks import CONTROL_PLANE

pytestmark = CONTROL_PLANE

NAME = "mizzen-shared"
SHARED = ("Deployment", "Service", "ServiceAccount", "RoleBinding", "Secret", "ConfigMap")


class Harbour:
    """Services of one namespace and their shared gateway."""

    def __init__(self, api: Any, namespace: str, minimal: Callable[..., Any], eventually: Any) -> None:
        self.api, self.namespace, self._minimal, self.eventually = api, namespace, minimal, eventually

    def create(self, name: str, **spec: Any) -> None:
        body = self._minimal(name, **{"engine": {"device": "CPU"}, **spec})
        gateway = {"mode": "Shared", "replicas": 1}
        body["spec"]["gateway"] = {**gateway, **body["spec"].get("gateway", {})}
        body["metadata"]["namespace"] = self.namespace
        self.api.create(body)

    def patch(self, name: str, **spec: Any) -> None:
        self.api.patch("InferenceService", self.namespace, name, {"spec": spec})

    def delete(self, name: str) -> None:
        self.api.delete("InferenceService", self.namespace, name)

    def get(self, kind: str, name: str = NAME) -> dict[str, Any]:
        return self.api.get(kind, self.namespace, name)

    def find(self, kind: str, name: str = NAME) -> dict[str, Any] | None:
        return self.api.find(kind, self.namespace, name)

    def status(self, name: str) -> dict[str, Any]:
        return self.get("InferenceService", name).get("status", {})

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        absent = {"status": "Absent", "reason": "", "message": ""}
        return next((c for c in self.status(name).get("conditions", []) if c["type"] == kind), absent)

    def ready(self, name: str) -> bool:
        condition = self.condition(name, "Ready")
        generation = self.get("InferenceService", name)["metadata"]["generation"]
        return condition["status"] == "True" and condition["observedGeneration"] == generation

    def settle(self, *names: str) -> None:
        for name in names:
            try:
                self.eventually(lambda name=name: self.ready(name), 90)
            except AssertionError:
                raise AssertionError(f"{name} is not Ready: {self.status(name)}") from None

    def listed(self) -> dict[str, dict[str, Any]]:
        content = self.get("ConfigMap")["data"]["services.json"]
        return {entry["name"]: entry for entry in json.loads(content)["services"]}

    def owners(self, kind: str) -> set[str]:
        return {owner["name"] for owner in self.get(kind)["metadata"]["ownerReferences"]}

    def secret(self, name: str) -> dict[str, str]:
        data = self.get("Secret", name)["data"]
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    def arguments(self) -> list[str]:
        return self.get("Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]


@pytest.fixture
def harbour(
    api: Any, node: Any, operators: Any, namespace: str, minimal: Callable[..., Any], eventually: Any
) -> Iterator[Harbour]:
    yield Harbour(api, namespace, minimal, eventually)
    node.behaviour = type(node.behaviour)()
    for body in api.list("InferenceService", namespace):
        api.delete("InferenceService", namespace, body["metadata"]["name"])


def test_two_services_have_one_gateway_that_is_deleted_with_the_last_service(harbour: Harbour) -> None:
    harbour.create("first", model={"aliases": ["one"]})
    harbour.create("second")
    harbour.settle("first", "second")
    url = f"http://{NAME}.{harbour.namespace}.svc:8000/v1"
    assert harbour.status("first")["url"] == harbour.status("second")["url"] == url
    assert harbour.condition("second", "Conflict")["reason"] == "NoConflict"
    deployments = harbour.api.list("Deployment", harbour.namespace)
    assert [deployment["metadata"]["name"] for deployment in deployments] == [NAME]
    for kind in SHARED:
        assert harbour.owners(kind) == {"first", "second"}, kind
        assert not any("controller" in owner for owner in harbour.get(kind)["metadata"]["ownerReferences"])
    listed = harbour.listed()
    assert listed["first"]["models"] == ["first", "one"]
    assert "--services-config-map" in harbour.arguments()

    # The engines of each service have their own keys, and trust only the shared gateway.
    gateway = harbour.secret(NAME)
    assert set(gateway) == {"gateway.public", "gateway.secret", "admin.token"}
    for name in ("first", "second"):
        engine = harbour.secret(f"{name}-engine-keys")
        assert engine["gateway.public"] == gateway["gateway.public"]
        assert zmq.curve_public(engine["engine.secret"].encode()).decode() == listed[name]["enginePublicKey"]
        assert harbour.find("Secret", f"{name}-gateway-keys") is None
    assert listed["first"]["enginePublicKey"] != listed["second"]["enginePublicKey"]

    harbour.delete("first")
    harbour.eventually(lambda: set(harbour.listed()) == {"second"})
    for kind in SHARED:
        harbour.eventually(lambda kind=kind: harbour.owners(kind) == {"second"}, expectation=kind)
    harbour.settle("second")
    assert harbour.secret(NAME) == gateway
    harbour.delete("second")
    kinds = (*SHARED[:2], *SHARED[3:5], "Pod")
    harbour.eventually(
        lambda: not any(harbour.api.list(kind, harbour.namespace) for kind in kinds) and not left(harbour)
    )


def left(harbour: Harbour) -> list[str]:
    return [kind for kind in SHARED if harbour.find(kind) is not None]


def test_a_name_conflict_is_reported_by_the_later_service(harbour: Harbour) -> None:
    harbour.create("first", model={"servedName": "chat"})
    harbour.settle("first")
    harbour.create("second", model={"servedName": "chat", "aliases": ["other"]})
    harbour.eventually(lambda: harbour.condition("second", "Conflict")["status"] == "True")
    conflict = harbour.condition("second", "Conflict")
    assert conflict["reason"] == "NameConflict"
    assert "409: 'chat' belongs to InferenceService first" in conflict["message"]
    harbour.eventually(lambda: harbour.condition("second", "Available")["reason"] == "NameConflict")
    assert harbour.condition("second", "Ready")["status"] == "False"
    assert harbour.condition("first", "Conflict")["status"] == "False"
    assert harbour.listed()["second"]["models"] == ["other"]
    assert harbour.ready("first")
    harbour.delete("first")  # frees the name
    harbour.settle("second")
    assert harbour.listed()["second"]["models"] == ["chat", "other"]
    assert harbour.condition("second", "Available")["status"] == "True"


def test_the_gateway_has_the_settings_of_the_oldest_service(harbour: Harbour) -> None:
    harbour.create("first", gateway={"service": {"port": 80}})
    harbour.settle("first")
    harbour.create("second", gateway={"replicas": 2})
    harbour.settle("second")
    conflict = harbour.condition("second", "Conflict")
    assert (conflict["status"], conflict["reason"]) == ("True", "GatewaySettingsDiffer")
    assert "replicas, service.port" in conflict["message"]
    assert harbour.get("Deployment")["spec"]["replicas"] == 1
    assert harbour.status("second")["url"].endswith(".svc:80/v1")
    harbour.patch("first", gateway={"cors": {"allowOrigins": ["https://chat.example.com"]}})
    harbour.eventually(lambda: "https://chat.example.com" in harbour.arguments())
    harbour.delete("first")
    harbour.eventually(lambda: harbour.get("Deployment")["spec"]["replicas"] == 2)
    harbour.eventually(lambda: harbour.status("second")["url"].endswith(".svc:8000/v1"))
    harbour.settle("second")


def test_a_suspended_service_is_listed_as_suspended_while_the_other_keeps_serving(harbour: Harbour) -> None:
    harbour.create("first")
    harbour.create("second")
    harbour.settle("first", "second")
    before = harbour.get("Deployment")["metadata"]["generation"]
    harbour.patch("first", suspend=True)
    harbour.eventually(lambda: harbour.listed()["first"]["suspended"])
    harbour.eventually(lambda: harbour.condition("first", "Ready")["reason"] == "Suspended")
    assert not harbour.listed()["second"]["suspended"]
    assert harbour.ready("second")
    assert (
        harbour.get("Deployment")["metadata"]["generation"] == before
    )  # the gateway's pods are not replaced


def test_objects_deleted_by_hand_are_recreated_with_the_same_keys(harbour: Harbour) -> None:
    harbour.create("first")
    harbour.settle("first")
    before = harbour.secret("first-engine-keys")
    harbour.api.delete("Deployment", harbour.namespace, NAME)
    harbour.api.delete("Service", harbour.namespace, NAME)
    harbour.api.delete("Secret", harbour.namespace, "first-keys")
    harbour.eventually(lambda: harbour.find("Deployment") and harbour.find("Service"))
    harbour.patch("first", engine={"maxRunningRequests": 7})
    harbour.settle("first")
    assert harbour.secret("first-engine-keys") == before


def test_an_object_of_another_owner_is_left_alone(harbour: Harbour) -> None:
    meta = {"name": NAME, "namespace": harbour.namespace}
    harbour.api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"mine": "yes"}})
    harbour.create("first")
    harbour.eventually(lambda: harbour.condition("first", "Failed")["reason"] == "NameTaken")
    assert f"ConfigMap {NAME} belongs to something else" in harbour.condition("first", "Failed")["message"]
    assert harbour.get("ConfigMap")["data"] == {"mine": "yes"}
    harbour.api.delete("ConfigMap", harbour.namespace, NAME)
    harbour.settle("first")


def test_no_object_is_written_once_all_services_have_settled(harbour: Harbour) -> None:
    """Reconciles of services that share a gateway do not undo each other's changes."""
    harbour.create("first")
    harbour.create("second", gateway={"replicas": 2}, model={"aliases": ["first"]})
    harbour.settle("first")
    harbour.eventually(lambda: harbour.condition("second", "Conflict")["status"] == "True")

    def versions() -> list[str]:
        bodies = [harbour.get(kind) for kind in SHARED]
        bodies += harbour.api.list("InferenceService", harbour.namespace)
        return [body["metadata"]["resourceVersion"] for body in bodies]

    def idle() -> bool:
        before = versions()
        time.sleep(8)  # the gateways are polled every 5 s
        return versions() == before

    harbour.eventually(idle, 90)


def test_a_service_in_dedicated_mode_keeps_its_own_gateway(harbour: Harbour) -> None:
    harbour.create("first")
    harbour.create("second", gateway={"mode": "Dedicated"})
    harbour.settle("first", "second")
    assert harbour.find("Deployment", "second-gateway") is not None
    assert set(harbour.listed()) == {"first"}
    assert harbour.condition("second", "Conflict")["status"] == "Absent"


def test_the_gateway_mode_is_immutable(harbour: Harbour) -> None:
    harbour.create("first")
    with pytest.raises(Exception, match=r"spec\.gateway\.mode is immutable"):
        harbour.patch("first", gateway={"mode": "Dedicated"})
