# SPDX-License-Identifier: Apache-2.0
"""Lost nodes and devices: groups move without waiting for the lost pod, and one Event gives the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from marks import CONTROL_PLANE

pytestmark = CONTROL_PLANE


@dataclass
class Demo:
    """One service with two groups."""

    api: Any
    node: Any
    namespace: str
    eventually: Callable[..., Any]

    def status(self) -> dict[str, Any]:
        return self.api.get("InferenceService", self.namespace, "demo").get("status", {})

    def condition(self, kind: str) -> str:
        conditions = self.status().get("conditions", [])
        return next((entry["status"] for entry in conditions if entry["type"] == kind), "Absent")

    def engines(self) -> list[dict[str, Any]]:
        return self.api.list("Pod", self.namespace, "mizzen.dev/component=engine")

    def settle(self) -> None:
        self.eventually(
            lambda: self.condition("Ready") == "True" and self.status()["availableReplicas"] == 2, 90
        )

    def events(self, reason: str) -> list[dict[str, Any]]:
        return [entry for entry in self.api.list("Event", self.namespace) if entry["reason"] == reason]

    def group(self, name: str) -> dict[str, Any]:
        return next((entry for entry in self.status().get("groups", []) if entry["name"] == name), {})


@pytest.fixture
def demo(api: Any, node: Any, operators: Any, namespace: str, minimal: Any, eventually: Any) -> Any:
    body = minimal(engine={"device": "CPU"}, gateway={"replicas": 1}, replicas=2)
    body["metadata"]["namespace"] = namespace
    api.create(body)
    service = Demo(api, node, namespace, eventually)
    service.settle()
    yield service
    node.behaviour = type(node.behaviour)()
    api.delete("InferenceService", namespace, "demo")


def test_a_group_on_a_lost_node_is_replaced_while_its_pod_cannot_terminate(demo: Demo, api: Any) -> None:
    lost, kept = demo.engines()
    meta = lost["metadata"]
    for key in ("not-ready", "unreachable"):  # with these tolerations, Kubernetes itself acts after 30 s
        [stay] = [t for t in lost["spec"]["tolerations"] if t.get("key") == f"node.kubernetes.io/{key}"]
        assert (stay["effect"], stay["tolerationSeconds"]) == ("NoExecute", 30)
    demo.node.behaviour.dead.add(meta["uid"])
    words = "Taint manager: deleting due to NoExecute taint"
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    condition["lastTransitionTime"] = datetime.now(UTC).strftime(
        "%Y-%m-%dT%H:%M:%SZ"
    )  # otherwise the status would be stale
    path = f"/api/v1/namespaces/{demo.namespace}/pods/{meta['name']}"
    api.request(
        "PATCH",
        f"{path}/status",
        {"metadata": {"uid": meta["uid"]}, "status": {"conditions": [{**condition, "message": words}]}},
        content_type="application/strategic-merge-patch+json",
    )
    api.request("DELETE", path, {"gracePeriodSeconds": 3600})
    demo.eventually(lambda: len(demo.engines()) == 3, 60)
    demo.settle()
    there = {pod["metadata"]["uid"] for pod in demo.engines()}
    assert {meta["uid"], kept["metadata"]["uid"]} < there
    assert len(there) == 3, "the pod on the lost node stays, because it may still run"
    demo.eventually(lambda: demo.group(meta["name"]).get("reason") == "NodeLost", 60)
    assert "node sim is lost" in demo.group(meta["name"])["message"]
    demo.eventually(lambda: demo.events("NodeLost"), 60)
    # The node is removed, and the pod with it.
    api.request("DELETE", path, {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}})
    demo.eventually(lambda: not demo.group(meta["name"]), 60)
    demo.settle()
    assert len(demo.engines()) == 2
    assert len(demo.events("NodeLost")) == 1


def test_a_group_that_lost_its_device_moves(demo: Demo, operators: Any) -> None:
    lost, kept = (pod["metadata"] for pod in demo.engines())
    demo.node.behaviour.lost_devices.add(lost["uid"])
    demo.eventually(lambda: lost["uid"] not in {p["metadata"]["uid"] for p in demo.engines()}, 60)
    demo.settle()
    names = {pod["metadata"]["name"] for pod in demo.engines()}
    assert kept["name"] in names and lost["name"] not in names
    demo.eventually(lambda: demo.events("DeviceLost"), 60)
    [event] = demo.events("DeviceLost")
    assert lost["name"] in event["message"] and "uncorrectable ECC error" in event["message"]
    assert event["type"] == "Warning"
    [failure] = demo.status()["recentFailures"]
    assert (failure["name"], failure["node"]) == (lost["name"], "sim")
    assert not [pod for pod in demo.engines() if "affinity" in pod["spec"]], "one loss may be bad luck"

    demo.node.behaviour.lost_devices.add(kept["uid"])
    demo.eventually(lambda: kept["uid"] not in {p["metadata"]["uid"] for p in demo.engines()}, 60)
    demo.settle()
    [moved] = [pod for pod in demo.engines() if pod["metadata"]["name"] not in names]
    assert moved["metadata"]["annotations"]["mizzen.dev/avoided-nodes"] == "sim"
    [term] = next(iter(moved["spec"]["affinity"]["nodeAffinity"].values()))["nodeSelectorTerms"]
    assert term["matchFields"] == [{"key": "metadata.name", "operator": "NotIn", "values": ["sim"]}]
    status = demo.status()
    assert status["avoidedNodes"] == ["sim"]
    [scheduled] = [entry for entry in status["conditions"] if entry["type"] == "Scheduled"]
    assert "new groups are not placed on sim" in scheduled["message"]
    [event] = demo.eventually(lambda: demo.events("NodeAvoided"), 60)
    assert (event["type"], "node sim 2 times" in event["message"]) == ("Warning", True)
    metrics = operators.http(operators.leader(), "/metrics")
    assert f'avoided_nodes{{namespace="{demo.namespace}",service="demo"}} 1.0' in metrics


def test_a_group_without_a_working_device_exhausts_its_restart_budget(demo: Demo, api: Any) -> None:
    behaviour = demo.node.behaviour
    behaviour.broken_devices.add(demo.namespace)
    kept = demo.engines()[0]["metadata"]
    patch = {"spec": {"lifecycle": {"maxGroupRestarts": 1}}}
    api.patch("InferenceService", demo.namespace, "demo", patch)

    def failed() -> dict[str, str]:
        conditions = demo.status().get("conditions", [])
        return next(
            (entry for entry in conditions if entry["type"] == "Failed" and entry["status"] == "True"), {}
        )

    demo.eventually(lambda: failed().get("reason") == "RestartBudgetExceeded", 120)
    assert "failed more than 1 times within an hour (device_lost: rank 0 failed" in failed()["message"]
    demo.eventually(lambda: kept["name"] not in {p["metadata"]["name"] for p in demo.engines()}, 60)
    behaviour.broken_devices.clear()
    api.patch("InferenceService", demo.namespace, "demo", {"spec": {"lifecycle": {"maxGroupRestarts": 2}}})
    demo.settle()


def test_a_toleration_in_the_spec_overrides_the_default_one(
    api: Any, operators: Any, namespace: str, minimal: Any, eventually: Any
) -> None:
    own = [{"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}]
    body = minimal(engine={"device": "CPU"}, podTemplate={"tolerations": own})
    body["metadata"]["namespace"] = namespace
    api.create(body)
    eventually(lambda: api.list("Pod", namespace, "mizzen.dev/component=engine"), 60)
    [pod] = api.list("Pod", namespace, "mizzen.dev/component=engine")
    given = {entry["key"]: entry.get("tolerationSeconds") for entry in pod["spec"]["tolerations"]}
    assert given == {"node.kubernetes.io/unreachable": None, "node.kubernetes.io/not-ready": 30}
    api.delete("InferenceService", namespace, "demo")
