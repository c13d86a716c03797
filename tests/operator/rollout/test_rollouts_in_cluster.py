# SPDX-License-Identifier: Apache-2.0
"""Rollouts, replacements and evictions of groups against a real API server."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import datetime
from itertools import pairwise
from typing import Any

import pytest

from live_service import Service
from marks import CONTROL_PLANE
from mizzen_operator.pods.group import BACKOFF_BASE_SECONDS

pytestmark = CONTROL_PLANE


@pytest.fixture
def service(live_service: Callable[..., Service]) -> Callable[..., Service]:
    return live_service


def test_pods_that_a_node_rejects_are_created_again_with_back_off(
    service: Callable[..., Service], node: Any, namespace: str
) -> None:
    node.behaviour.rejected = {namespace}
    demo = service()
    demo.eventually(lambda: demo.condition("Failed")["status"] == "True")
    assert demo.condition("Failed")["reason"] == "UnexpectedAdmissionError"
    assert "no device is left" in demo.condition("Ready")["message"]

    def creation_times() -> list[datetime]:
        ours = [
            name for name in node.names if name.startswith(f"{namespace}/demo-") and "gateway" not in name
        ]
        return [datetime.fromisoformat(node.created[name]) for name in ours]

    demo.eventually(lambda: len(creation_times()) >= 3, 90)
    # Attempt n backs off for 2^(n + 1) s. Times and back-offs are whole seconds.
    for attempt, (earlier, later) in enumerate(pairwise(creation_times())):
        assert (later - earlier).total_seconds() >= BACKOFF_BASE_SECONDS * 2**attempt
    node.behaviour.rejected = set()
    demo.settle(1)


def test_an_engine_that_no_gateway_reaches_is_not_available(
    service: Callable[..., Service], node: Any
) -> None:
    """The pod stays ready: only the gateways notice the unreachable engine, and no watch reports it."""
    demo = service()
    demo.settle(1)
    time.sleep(2)  # nothing is in progress any more, so that nothing else triggers a reconcile
    [pod] = demo.pods()
    node.behaviour.unreachable = {pod["metadata"]["uid"]}
    demo.eventually(lambda: demo.condition("Available")["status"] == "False")
    assert demo.status()["readyReplicas"] == 1
    assert demo.condition("Ready")["status"] == "False"
    assert demo.live() == [pod["metadata"]["name"]]
    why = node.behaviour.why_unreachable
    demo.eventually(lambda: demo.status()["groups"][0].get("message") == why)
    assert demo.status()["groups"][0]["state"] == "Connecting"
    node.behaviour.unreachable = set()
    demo.settle(1)
    assert "message" not in demo.status()["groups"][0]


def test_engines_with_another_protocol_than_the_gateways_are_replaced(
    service: Callable[..., Service], node: Any
) -> None:
    """After an upgrade that changes the protocol, gateways reach only the new groups."""
    demo = service(replicas=2, rollout={"paused": True})
    demo.settle(2)
    old = {pod["metadata"]["uid"] for pod in demo.pods()}
    node.behaviour.protocol_mismatches = old
    demo.patch(engine={"pageSize": 32})
    demo.eventually(lambda: demo.condition("Available")["reason"] == "NoGroupServes")
    time.sleep(1)  # while the rollout is paused, the operator replaces no group
    assert {pod["metadata"]["uid"] for pod in demo.pods()} == old
    demo.patch(rollout={"paused": False})
    demo.settle(2)
    assert not {pod["metadata"]["uid"] for pod in demo.pods()} & old


def test_old_engines_that_no_gateway_reaches_are_replaced(service: Callable[..., Service], node: Any) -> None:
    """The old engines may become reachable again, but a rollout that waits for that might never end."""
    demo = service(replicas=2)
    demo.settle(2)
    old = {pod["metadata"]["uid"] for pod in demo.pods()}
    node.behaviour.unreachable = old
    demo.eventually(lambda: demo.condition("Available")["status"] == "False")
    assert {pod["metadata"]["uid"] for pod in demo.pods()} == old
    demo.patch(engine={"pageSize": 32})
    demo.settle(2)
    assert not {pod["metadata"]["uid"] for pod in demo.pods()} & old


def revisions(demo: Service) -> dict[str, int]:
    """Return the `revision` numbers of a service's ControllerRevisions, by revision label."""
    listed = demo.api.list("ControllerRevision", demo.namespace, "mizzen.dev/service=demo")
    assert all(earlier["metadata"]["name"] == f"demo-{label(earlier, 'revision')}" for earlier in listed)
    return {label(earlier, "revision"): earlier["revision"] for earlier in listed}


def label(body: dict[str, Any], name: str) -> str:
    return body["metadata"]["labels"][f"mizzen.dev/{name}"]


def test_a_spec_that_is_applied_again_has_its_old_revision(service: Callable[..., Service]) -> None:
    demo = service(revisionHistoryLimit=0)
    demo.settle(1)
    first = demo.status()["updateRevision"]
    assert demo.status()["currentRevision"] == first
    for pages in (32, 64):
        demo.patch(engine={"pageSize": pages})
        demo.settle(1)
    last = demo.status()["updateRevision"]
    assert revisions(demo)[last] == 3
    assert len(revisions(demo)) == 2, "no more than what serves and what served before"
    demo.patch(engine={"pageSize": 32})
    demo.settle(1)
    again = demo.status()["updateRevision"]
    assert demo.status()["currentRevision"] == again not in (first, last)
    assert revisions(demo) == {last: 3, again: 4}


def test_a_partition_keeps_and_restores_the_old_revision(service: Callable[..., Service]) -> None:
    demo = service(replicas=2, rollout={"partition": 1})
    demo.settle(2)
    old = demo.status()["updateRevision"]
    demo.patch(engine={"pageSize": 32})
    demo.eventually(lambda: demo.condition("Ready")["reason"] == "PartitionReached", 90)
    demo.eventually(lambda: sorted(label(pod, "revision") == old for pod in demo.pods()) == [False, True], 90)
    [kept] = [pod for pod in demo.pods() if label(pod, "revision") == old]
    demo.api.delete("Pod", demo.namespace, kept["metadata"]["name"], gracePeriodSeconds=30)

    def restored() -> bool:
        pods = [pod for pod in demo.pods() if pod["metadata"]["uid"] != kept["metadata"]["uid"]]
        return sorted(label(pod, "revision") == old for pod in pods) == [False, True]

    demo.eventually(restored, 90)
    demo.eventually(lambda: demo.condition("Ready")["reason"] == "PartitionReached", 90)
    [creation_times] = [
        pod
        for pod in demo.pods()
        if label(pod, "revision") == old and pod["metadata"]["uid"] != kept["metadata"]["uid"]
    ]
    assert creation_times["spec"]["containers"][0]["args"] == kept["spec"]["containers"][0]["args"]
    demo.patch(rollout={"partition": 0})
    demo.settle(2)
    assert {label(pod, "revision") for pod in demo.pods()} == {demo.status()["updateRevision"]} != {old}


def evict(demo: Service, name: str) -> int:
    """Evict a pod, and return the API server's status code."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    try:
        demo.api.request("POST", f"/api/v1/namespaces/{demo.namespace}/pods/{name}/eviction", body)
    except Exception as error:
        return int(error.code)  # type: ignore[attr-defined]
    return 201


def allowed(demo: Service, name: str) -> int:
    """Return the number of evictions that a budget allows now, or -1 if its status is not conclusive yet.

    The status is conclusive once it describes the budget's current generation and counts all pods as
    healthy. An unhealthy pod may be evicted even if the budget allows no evictions.
    """
    budget = demo.api.find("PodDisruptionBudget", demo.namespace, name)
    if budget is None or budget["status"].get("observedGeneration") != budget["metadata"]["generation"]:
        return -1
    counted = budget["status"]
    return counted["disruptionsAllowed"] if counted["currentHealthy"] == counted["expectedPods"] else -1


def test_evictions_leave_the_minimum_of_serving_groups(service: Callable[..., Service], node: Any) -> None:
    demo = service(gateway={"replicas": 2})
    demo.settle(1)
    demo.eventually(lambda: allowed(demo, "demo-engine") == 0 and allowed(demo, "demo-gateway") == 1)
    assert evict(demo, demo.live()[0]) == 429
    demo.patch(replicas=2)
    demo.settle(2)
    demo.eventually(lambda: allowed(demo, "demo-engine") == 1)
    node.reset_lowest(demo.namespace)
    before = demo.live()
    assert evict(demo, before[0]) == 201
    assert evict(demo, before[1]) == 429
    demo.settle(2)
    demo.eventually(lambda: allowed(demo, "demo-engine") == 1)
    assert evict(demo, before[1]) == 201
    demo.settle(2)
    assert not set(before) & set(demo.live())
    assert node.lowest[demo.namespace] >= 1
    demo.patch(availability={"podDisruptionBudget": "Disabled"})
    demo.eventually(lambda: demo.api.list("PodDisruptionBudget", demo.namespace) == [])


def test_a_group_that_fails_too_often_is_abandoned_until_the_spec_changes(
    service: Callable[..., Service], node: Any, operators: Any
) -> None:
    node.behaviour.broken_models = {"/models/broken"}
    demo = service(model={"source": "file:///models/broken"}, lifecycle={"maxGroupRestarts": 2})
    demo.eventually(lambda: demo.condition("Failed")["reason"] == "RestartBudgetExceeded", 90)
    assert "no config.json in the model's folder" in demo.condition("Failed")["message"]
    demo.eventually(lambda: demo.pods() == [], 90)
    counted = re.search(
        rf'group_failures_total{{cause="rank_failed",namespace="{demo.namespace}",service="demo"}} (\S+)',
        operators.http(operators.leader(), "/metrics"),
    )
    assert counted
    assert float(counted[1]) >= 2
    demo.patch(replicas=2)
    demo.eventually(lambda: demo.status()["observedGeneration"] == demo.body()["metadata"]["generation"])
    assert demo.condition("Failed")["reason"] == "RestartBudgetExceeded", "replicas are no change of the spec"
    demo.patch(model={"source": "file:///models/whole"})
    demo.settle(2)
    assert "givenUp" not in demo.status()
