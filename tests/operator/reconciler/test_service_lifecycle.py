# SPDX-License-Identifier: Apache-2.0
"""The life of a service: it starts, scales, and changes its spec."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from live_service import Service
from marks import CONTROL_PLANE

pytestmark = CONTROL_PLANE


@pytest.fixture
def service(live_service: Callable[..., Service]) -> Callable[..., Service]:
    return live_service


def test_a_new_service_becomes_ready(service: Callable[..., Service], api: Any) -> None:
    demo = service(replicas=2, gateway={"replicas": 2})
    demo.settle(2)
    status = demo.status()
    assert status["url"] == f"http://demo-gateway.{demo.namespace}.svc:8000/v1"
    assert (status["servedName"], status["perPod"]) == ("demo", 0)
    assert {c["type"]: c["status"] for c in status["conditions"]} == {
        "Ready": "True",
        "Available": "True",
        "Progressing": "False",
        "Scheduled": "True",
        "GatewayReady": "True",
        "Failed": "False",
    }
    assert [group["state"] for group in status["groups"]] == ["Serving", "Serving"]
    start = status["coldStart"]
    assert start["group"] in demo.live() and start["firstReadySeconds"] >= start["warmupSeconds"] >= 0
    assert len(api.list("Pod", demo.namespace, status["selector"])) == 2
    for kind, name in (
        ("Deployment", "demo-gateway"),
        ("Service", "demo-gateway"),
        ("ServiceAccount", "demo-gateway"),
        ("RoleBinding", "demo-gateway"),
        ("Secret", "demo-keys"),
        ("Secret", "demo-engine-keys"),
        ("Secret", "demo-gateway-keys"),
        *(("Pod", pod["metadata"]["name"]) for pod in demo.pods()),
    ):
        meta = api.get(kind, demo.namespace, name)["metadata"]
        assert meta["ownerReferences"][0]["uid"] == demo.body()["metadata"]["uid"], (kind, name)
        assert meta["labels"]["mizzen.dev/service"] == "demo", (kind, name)


def test_scaling_goes_up_and_down(service: Callable[..., Service], node: Any) -> None:
    demo = service()
    demo.settle(1)
    node.reset_lowest(demo.namespace)
    demo.api.patch("InferenceService", demo.namespace, "demo", {"spec": {"replicas": 3}}, "scale")
    demo.settle(3)
    assert len({pod["metadata"]["labels"]["mizzen.dev/group"] for pod in demo.pods()}) == 3
    demo.patch(replicas=1)
    demo.settle(1)
    assert node.lowest[demo.namespace] == 1


def test_scale_to_zero_and_back(service: Callable[..., Service]) -> None:
    demo = service()
    demo.settle(1)
    demo.patch(replicas=0)
    demo.settle(0)
    assert demo.condition("Available")["reason"] == "ScaledToZero"
    demo.patch(replicas=1)
    demo.settle(1)


def test_a_deleted_pod_is_replaced_before_it_is_gone(service: Callable[..., Service], node: Any) -> None:
    demo = service()
    demo.settle(1)
    node.behaviour.drain = float("inf")
    [victim] = demo.live()
    demo.api.delete("Pod", demo.namespace, victim, gracePeriodSeconds=30)
    demo.eventually(lambda: [name for name in demo.live() if name != victim])
    assert victim in [pod["metadata"]["name"] for pod in demo.pods()]
    [replacement] = demo.live()
    assert replacement == victim.rpartition("-")[0] + "-1"
    node.behaviour.drain = 0.0
    demo.settle(1)


def test_a_spec_change_replaces_groups_one_by_one(service: Callable[..., Service], node: Any) -> None:
    demo = service(replicas=2)
    demo.settle(2)
    before = set(demo.live())
    node.reset_lowest(demo.namespace)
    demo.patch(engine={"maxRunningRequests": 64})
    most = 0

    def done() -> bool:
        nonlocal most
        most = max(most, len(demo.live()))
        return not before & set(demo.live()) and demo.ready(2)

    demo.eventually(done, 90)
    assert node.lowest[demo.namespace] == 2
    assert most <= 3


def test_a_broken_revision_leaves_the_old_one_serving_and_a_revert_repairs_it(
    service: Callable[..., Service], node: Any
) -> None:
    demo = service(replicas=2)
    demo.settle(2)
    before = demo.live()
    node.behaviour.broken_models = {"/models/broken"}
    node.reset_lowest(demo.namespace)
    demo.patch(model={"source": "file:///models/broken"})
    demo.eventually(lambda: demo.condition("Failed")["status"] == "True")
    failed = demo.condition("Failed")
    assert failed["reason"] == "CrashLoopBackOff"
    assert "no config.json in the model's folder" in failed["message"]
    assert demo.condition("Ready")["reason"] == "CrashLoopBackOff"
    assert demo.condition("Available")["status"] == "True"
    assert demo.condition("Progressing")["status"] == "False"
    assert demo.status()["groups"][0]["state"] == "Failed"
    time.sleep(1)
    assert set(before) < set(demo.live())
    demo.patch(model={"source": "file:///opt/mizzen/models/demo"})
    demo.settle(2)
    assert demo.live() == before
    assert node.lowest[demo.namespace] == 2


def test_a_change_of_the_spec_repairs_a_service_whose_groups_are_all_broken(
    service: Callable[..., Service], node: Any
) -> None:
    demo = service(replicas=2)
    demo.settle(2)
    node.behaviour.unready = {pod["metadata"]["uid"] for pod in demo.pods()}
    demo.eventually(lambda: demo.condition("Available")["reason"] == "NoGroupServes")
    before = demo.live()
    demo.patch(engine={"pageSize": 32})
    demo.settle(2)
    assert not set(demo.live()) & set(before)


def test_replicas_may_change_in_the_middle_of_a_rollout(service: Callable[..., Service], node: Any) -> None:
    demo = service(replicas=3)
    demo.settle(3)
    before = set(demo.live())
    node.reset_lowest(demo.namespace)
    node.behaviour.start = 0.6
    demo.patch(engine={"pageSize": 32})
    demo.eventually(lambda: set(demo.live()) - before)
    demo.patch(replicas=1)
    demo.settle(1)
    assert not before & set(demo.live())
    assert node.lowest[demo.namespace] >= 1


def test_after_quick_changes_of_replicas_the_last_one_applies(
    service: Callable[..., Service],
) -> None:
    demo = service()
    demo.settle(1)
    for replicas in (4, 0, 3, 1, 5, 2):
        demo.patch(replicas=replicas)
        time.sleep(0.1)
    demo.settle(2)


def test_a_group_is_available_only_once_the_gateways_route_to_it(
    service: Callable[..., Service], node: Any
) -> None:
    demo = service()
    node.behaviour.failing_gateways = {demo.namespace}
    demo.eventually(lambda: demo.status().get("readyReplicas") == 1)
    time.sleep(0.5)
    assert demo.condition("Ready")["status"] == demo.condition("Available")["status"] == "False"
    assert demo.status()["groups"][0]["state"] == "Connecting"
    node.behaviour.failing_gateways = set()
    demo.settle(1)


def test_an_engine_that_is_not_ready_is_not_available(service: Callable[..., Service], node: Any) -> None:
    demo = service()
    demo.settle(1)
    [pod] = demo.pods()
    node.behaviour.unready = {pod["metadata"]["uid"]}
    demo.eventually(lambda: demo.condition("Available")["status"] == "False")
    assert demo.condition("Ready")["status"] == "False"
    assert len(demo.pods()) == 1
    node.behaviour.unready = set()
    demo.settle(1)
