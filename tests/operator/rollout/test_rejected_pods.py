# SPDX-License-Identifier: Apache-2.0
"""Services while the API server rejects their pods because of a quota or a failing webhook."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from live_service import ENGINES, Service, api_requests
from marks import CONTROL_PLANE
from mizzen_local.controlplane import ControlPlane
from webhooks import LIMIT_SECONDS, failing, hanging, is_called, rejects_pods

pytestmark = CONTROL_PLANE


def limit_pods(api: Any, namespace: str, pods: int) -> None:
    metadata = {"name": "few", "namespace": namespace}
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    spec = {"hard": {"pods": str(pods)}}
    api.request(
        "POST", path, {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": spec}
    )


def quota(api: Any, namespace: str) -> dict[str, Any]:
    return api.request("GET", f"/api/v1/namespaces/{namespace}/resourcequotas/few").get("status", {})


def test_a_rollout_continues_if_a_quota_allows_no_additional_group(
    live_service: Callable[..., Service], api: Any, namespace: str
) -> None:
    limit_pods(api, namespace, 3)
    demo = live_service(replicas=2, rollout={"maxSurge": 1, "maxUnavailable": 1})
    demo.settle(2)
    demo.eventually(lambda: quota(api, namespace).get("used") == {"pods": "3"})
    before = demo.live()
    demo.patch(engine={"pageSize": 32})
    demo.eventually(lambda: not set(before) & set(demo.live()), expectation="all groups are replaced")
    demo.settle(2)
    assert demo.condition("Failed")["status"] == "False"


def test_policies_are_applied_before_the_first_engine_starts(
    live_service: Callable[..., Service], api: Any, namespace: str
) -> None:
    limit_pods(api, namespace, 2)
    demo = live_service(replicas=3, networkPolicy="Enabled")
    demo.eventually(lambda: demo.condition("Failed")["reason"] == "PodRejected")
    for kind in ("NetworkPolicy", "PodDisruptionBudget"):
        demo.eventually(lambda kind=kind: api.find(kind, namespace, "demo-engine"), expectation=kind)
    assert "quota" in demo.condition("Failed")["message"]


def test_a_rejected_revision_does_not_block_groups_of_another_one(
    live_service: Callable[..., Service], api: Any, namespace: str
) -> None:
    """While a priority class is missing, the API server rejects the pods of the revision that names it."""
    classes = "/apis/scheduling.k8s.io/v1/priorityclasses"
    kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": namespace}}
    api.request("POST", classes, {**kind, "value": 7})
    demo = live_service(replicas=2, rollout={"partition": 1}, podTemplate={"priorityClassName": namespace})
    demo.settle(2)
    [old] = {pod["metadata"]["labels"]["mizzen.dev/revision"] for pod in demo.pods()}
    demo.patch(podTemplate={"priorityClassName": None})

    def revisions() -> list[bool]:
        return sorted(pod["metadata"]["labels"]["mizzen.dev/revision"] == old for pod in demo.pods())

    demo.eventually(lambda: revisions() == [False, True] and demo.status()["availableReplicas"] == 2, 90)
    api.request("DELETE", f"{classes}/{namespace}")
    for name in demo.live():
        api.delete("Pod", namespace, name, gracePeriodSeconds=0)
    demo.eventually(lambda: revisions() == [False] and demo.status()["availableReplicas"] == 1, 90)
    demo.eventually(lambda: demo.condition("Failed")["reason"] == "PodRejected", 60)
    assert namespace in demo.condition("Failed")["message"]
    api.request("POST", classes, {**kind, "value": 7})
    demo.eventually(lambda: revisions() == [False, True] and demo.status()["availableReplicas"] == 2, 120)
    api.request("DELETE", f"{classes}/{namespace}")


def test_a_rejected_pod_is_retried_with_back_off_whatever_the_events(
    live_service: Callable[..., Service], api: Any, operators: Any, namespace: str
) -> None:
    def rejections() -> float:
        requests = api_requests(operators.http(operators.leader(), "/metrics"))
        return requests.get(("POST", "Pod", "403"), 0.0)

    limit_pods(api, namespace, 2)
    first = rejections()
    demo = live_service()
    demo.settle(1)
    demo.patch(replicas=2)
    demo.eventually(lambda: demo.condition("Failed")["reason"] == "PodRejected")
    demo.eventually(lambda: rejections() >= first + 6, expectation="retries are at least a second apart")
    before, began = rejections(), time.monotonic()
    for number in range(30):
        api.patch("Pod", namespace, demo.live()[0], {"metadata": {"annotations": {"touched": str(number)}}})
        time.sleep(0.1)
    assert rejections() - before <= time.monotonic() - began + 2
    api.delete("Pod", namespace, demo.live()[0], gracePeriodSeconds=0)
    demo.eventually(lambda: demo.condition("Available")["status"] == "False", 10)


def test_nothing_is_created_in_a_namespace_that_is_being_deleted(
    live_service: Callable[..., Service], api: Any, operators: Any, namespace: str
) -> None:
    demo = live_service(replicas=2)
    demo.settle(2)
    kept = demo.live()[0]
    api.patch("Pod", namespace, kept, {"metadata": {"finalizers": ["tests/kept"]}})
    api.request("DELETE", f"/api/v1/namespaces/{namespace}")
    demo.eventually(
        lambda: demo.condition("Ready")["reason"] == "NamespaceTerminating",
        expectation="the status reports that the namespace terminates",
    )
    demo.eventually(lambda: demo.condition("Failed")["status"] == "False")
    demo.eventually(lambda: [pod["metadata"]["name"] for pod in demo.pods()] == [kept])
    api.patch("Pod", namespace, kept, {"metadata": {"finalizers": None}})
    demo.eventually(lambda: api.find("InferenceService", namespace, "demo") is None)
    lines = [line for line in operators.log().splitlines() if f"{namespace}/demo" in line]
    assert [line for line in lines if "WARNING" in line or "ERROR" in line] == []


def test_the_status_stays_accurate_while_a_webhook_fails(
    live_service: Callable[..., Service], api: Any, namespace: str
) -> None:
    demo = live_service()
    demo.settle(1)
    with failing(api, namespace):
        demo.eventually(lambda: rejects_pods(api, namespace), expectation="the webhook is called")
        api.delete("Pod", namespace, demo.live()[0], gracePeriodSeconds=0)
        demo.eventually(lambda: demo.condition("Available")["status"] == "False")
        assert demo.condition("Ready")["status"] == "False"
        demo.eventually(lambda: demo.condition("Failed")["reason"] == "WebhookFailed")
        assert namespace in demo.condition("Failed")["message"], "it names the webhook"
        demo.patch(replicas=2)
        generation = demo.body()["metadata"]["generation"]
        demo.eventually(lambda: demo.status()["observedGeneration"] == generation)
        assert not api.list("Pod", namespace, ENGINES)
    demo.settle(2)
    assert demo.condition("Failed")["status"] == "False"


def test_the_status_stays_accurate_while_a_webhook_hangs(
    live_service: Callable[..., Service], api: Any, control_plane: ControlPlane, namespace: str
) -> None:
    demo = live_service()
    demo.settle(1)
    with hanging(api, control_plane, namespace) as webhook:
        demo.eventually(lambda: is_called(api, namespace, webhook), expectation="the webhook is called")
        api.delete("Pod", namespace, demo.live()[0], gracePeriodSeconds=0)
        demo.eventually(lambda: demo.condition("Available")["status"] == "False", LIMIT_SECONDS)
        assert demo.condition("Ready")["status"] == "False"
        demo.eventually(lambda: demo.condition("Failed")["reason"] == "WebhookFailed", 120)
    demo.settle(1)
