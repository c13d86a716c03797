"""Lost nodes and devices: groups move, nothing waits for the lost part, and one Event gives the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from marks import CONTROL_PLANE

pytestmark = CONTROL_PLANE


@dataclass
class Fleet:
    """One service with two groups."""

    api: Any
    node: Any
    namespace: str
    eventually: Callable[..., Any]

    def status(self) -> dict[str, Any]:
        return self.api.get("InferenceService", self.namespace, "demo").get("status", {})

    def condition(self, kind: str) -> str:
        found = self.status().get("conditions", [])
        return next((one["status"] for one in found if one["type"] == kind), "Absent")

    def engines(self) -> list[dict[str, Any]]:
        return self.api.list("Pod", self.namespace, "mizzen.dev/component=engine")

    def settle(self) -> None:
        self.eventually(
            lambda: self.condition("Ready") == "True" and self.status()["availableReplicas"] == 2, 90
        )

    def events(self, reason: str) -> list[dict[str, Any]]:
        return [one for one in self.api.list("Event", self.namespace) if one["reason"] == reason]

    def group(self, name: str) -> dict[str, Any]:
        return next((one for one in self.status().get("groups", []) if one["name"] == name), {})


@pytest.fixture
def fleet(api: Any, node: Any, operators: Any, namespace: str, minimal: Any, eventually: Any) -> Any:
    body = minimal(engine={"device": "CPU"}, gateway={"replicas": 1}, replicas=2)
    body["metadata"]["namespace"] = namespace
    api.create(body)
    made = Fleet(api, node, namespace, eventually)
    made.settle()
    yield made
    node.behaviour = type(node.behaviour)()
    api.delete("InferenceService", namespace, "demo")


def test_a_group_on_a_lost_node_is_replaced_while_its_pod_cannot_terminate(fleet: Fleet, api: Any) -> None:
    lost, kept = fleet.engines()
    meta = lost["metadata"]
    for key in ("not-ready", "unreachable"):  # what makes Kubernetes do what follows here, half a minute on
        [stay] = [t for t in lost["spec"]["tolerations"] if t.get("key") == f"node.kubernetes.io/{key}"]
        assert (stay["effect"], stay["tolerationSeconds"]) == ("NoExecute", 30)
    fleet.node.behaviour.dead.add(meta["uid"])
    words = "Taint manager: deleting due to NoExecute taint"
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    condition["lastTransitionTime"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")  # else it is stale
    path = f"/api/v1/namespaces/{fleet.namespace}/pods/{meta['name']}"
    api.request(
        "PATCH",
        f"{path}/status",
        {"metadata": {"uid": meta["uid"]}, "status": {"conditions": [{**condition, "message": words}]}},
        content_type="application/strategic-merge-patch+json",
    )
    api.request("DELETE", path, {"gracePeriodSeconds": 3600})
    fleet.eventually(lambda: len(fleet.engines()) == 3, 60)
    fleet.settle()
    there = {pod["metadata"]["uid"] for pod in fleet.engines()}
    assert {meta["uid"], kept["metadata"]["uid"]} < there
    assert len(there) == 3, "the pod on the lost node stays: nobody knows whether it has ended"
    fleet.eventually(lambda: fleet.group(meta["name"]).get("reason") == "NodeLost", 60)
    assert "node sim is lost" in fleet.group(meta["name"])["message"]
    fleet.eventually(lambda: fleet.events("NodeLost"), 60)
    # The node is removed, and the pod with it.
    api.request("DELETE", path, {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}})
    fleet.eventually(lambda: not fleet.group(meta["name"]), 60)
    fleet.settle()
    assert len(fleet.engines()) == 2
    assert len(fleet.events("NodeLost")) == 1


def test_a_group_that_lost_its_device_moves(fleet: Fleet) -> None:
    lost, kept = (pod["metadata"] for pod in fleet.engines())
    fleet.node.behaviour.lost_devices.add(lost["uid"])
    fleet.eventually(lambda: lost["uid"] not in {p["metadata"]["uid"] for p in fleet.engines()}, 60)
    fleet.settle()
    names = {pod["metadata"]["name"] for pod in fleet.engines()}
    assert kept["name"] in names and lost["name"] not in names
    fleet.eventually(lambda: fleet.events("DeviceLost"), 60)
    [event] = fleet.events("DeviceLost")
    assert lost["name"] in event["message"] and "uncorrectable ECC error" in event["message"]
    assert event["type"] == "Warning"
    [failure] = fleet.status()["recentFailures"]
    assert failure["name"] == lost["name"]


def test_a_group_without_a_working_device_exhausts_its_restart_budget(fleet: Fleet, api: Any) -> None:
    behaviour = fleet.node.behaviour
    behaviour.broken_devices.add(fleet.namespace)
    kept = fleet.engines()[0]["metadata"]
    patch = {"spec": {"lifecycle": {"maxGroupRestarts": 1}}}
    api.patch("InferenceService", fleet.namespace, "demo", patch)

    def failed() -> dict[str, str]:
        found = fleet.status().get("conditions", [])
        return next((one for one in found if one["type"] == "Failed" and one["status"] == "True"), {})

    fleet.eventually(lambda: failed().get("reason") == "RestartBudgetExceeded", 120)
    assert "failed more than 1 times within an hour (device_lost: rank 0 failed" in failed()["message"]
    fleet.eventually(lambda: kept["name"] not in {p["metadata"]["name"] for p in fleet.engines()}, 60)
    behaviour.broken_devices.clear()
    api.patch("InferenceService", fleet.namespace, "demo", {"spec": {"lifecycle": {"maxGroupRestarts": 2}}})
    fleet.settle()


def test_a_toleration_in_the_spec_overrides_the_default_one(
    api: Any, operators: Any, namespace: str, minimal: Any, eventually: Any
) -> None:
    own = [{"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}]
    body = minimal(engine={"device": "CPU"}, podTemplate={"tolerations": own})
    body["metadata"]["namespace"] = namespace
    api.create(body)
    eventually(lambda: api.list("Pod", namespace, "mizzen.dev/component=engine"), 60)
    [pod] = api.list("Pod", namespace, "mizzen.dev/component=engine")
    given = {one["key"]: one.get("tolerationSeconds") for one in pod["spec"]["tolerations"]}
    assert given == {"node.kubernetes.io/unreachable": None, "node.kubernetes.io/not-ready": 30}
    api.delete("InferenceService", namespace, "demo")
