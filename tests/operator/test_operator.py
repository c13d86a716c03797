"""The operator's process against a real API server: the life of a service, of its groups, of the operator."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from datetime import datetime
from itertools import pairwise
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from live_service import Service, api_requests, none_ends
from marks import CONTROL_PLANE
from mizzen_operator.pods.group import BACKOFF_BASE_SECONDS
from mizzen_operator.resources.metadata import CONTAINER_SECURITY, POD_SECURITY

pytestmark = CONTROL_PLANE


@pytest.fixture
def service(live_service: Callable[..., Service]) -> Callable[..., Service]:
    return live_service


def test_a_service_comes_up(service: Callable[..., Service], api: Any) -> None:
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


def test_a_broken_revision_never_takes_the_old_one_down_and_a_revert_mends_it(
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


def test_a_change_mends_a_service_whose_groups_have_all_broken(
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


def test_replicas_that_change_faster_than_groups_start_end_as_the_last_change_says(
    service: Callable[..., Service],
) -> None:
    demo = service()
    demo.settle(1)
    for replicas in (4, 0, 3, 1, 5, 2):
        demo.patch(replicas=replicas)
        time.sleep(0.1)
    demo.settle(2)


def test_a_group_counts_only_once_the_gateways_route_to_it(
    service: Callable[..., Service], node: Any
) -> None:
    demo = service()
    node.behaviour.deaf_gateways = {demo.namespace}
    demo.eventually(lambda: demo.status().get("readyReplicas") == 1)
    time.sleep(0.5)
    assert demo.condition("Ready")["status"] == demo.condition("Available")["status"] == "False"
    assert demo.status()["groups"][0]["state"] == "Connecting"
    node.behaviour.deaf_gateways = set()
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


def test_pods_that_a_node_turns_away_are_not_made_again_without_pause(
    service: Callable[..., Service], node: Any, namespace: str
) -> None:
    node.behaviour.turned_away = {namespace}
    demo = service()
    demo.eventually(lambda: demo.condition("Failed")["status"] == "True")
    assert demo.condition("Failed")["reason"] == "UnexpectedAdmissionError"
    assert "no device is left" in demo.condition("Ready")["message"]

    def made() -> list[datetime]:
        ours = [
            name for name in node.names if name.startswith(f"{namespace}/demo-") and "gateway" not in name
        ]
        return [datetime.fromisoformat(node.created[name]) for name in ours]

    demo.eventually(lambda: len(made()) >= 3, 90)
    # Incarnation n rests for 2^(n + 1) s. Times and rest are whole seconds, so that nothing is lost.
    for incarnation, (one, next_one) in enumerate(pairwise(made())):
        assert (next_one - one).total_seconds() >= BACKOFF_BASE_SECONDS * 2**incarnation
    node.behaviour.turned_away = set()
    demo.settle(1)


def test_an_engine_that_no_gateway_reaches_is_not_available(
    service: Callable[..., Service], node: Any
) -> None:
    """Its pod is as ready as before, so that no watch tells of it: only the gateways know."""
    demo = service()
    demo.settle(1)
    time.sleep(2)  # nothing is under way any more, so that nothing else makes the operator look
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


def test_engines_of_another_protocol_than_the_gateways_are_replaced(
    service: Callable[..., Service], node: Any
) -> None:
    """An upgrade that changes the protocol: no gateway reaches old groups any more, and new ones all do."""
    demo = service(replicas=2, rollout={"paused": True})
    demo.settle(2)
    old = {pod["metadata"]["uid"] for pod in demo.pods()}
    node.behaviour.strangers = old
    demo.patch(engine={"pageSize": 32})
    demo.eventually(lambda: demo.condition("Available")["reason"] == "NoGroupServes")
    time.sleep(1)  # held back, nothing mends it
    assert {pod["metadata"]["uid"] for pod in demo.pods()} == old
    demo.patch(rollout={"paused": False})
    demo.settle(2)
    assert not {pod["metadata"]["uid"] for pod in demo.pods()} & old


def test_old_engines_that_no_gateway_reaches_are_replaced(service: Callable[..., Service], node: Any) -> None:
    """They are ready and may be reached again, but a rollout that waited for that might wait for ever."""
    demo = service(replicas=2)
    demo.settle(2)
    old = {pod["metadata"]["uid"] for pod in demo.pods()}
    node.behaviour.unreachable = old
    demo.eventually(lambda: demo.condition("Available")["status"] == "False")
    assert {pod["metadata"]["uid"] for pod in demo.pods()} == old
    demo.patch(engine={"pageSize": 32})
    demo.settle(2)
    assert not {pod["metadata"]["uid"] for pod in demo.pods()} & old


def test_suspend_keeps_the_gateway(service: Callable[..., Service]) -> None:
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


def test_deletion_leaves_nothing(service: Callable[..., Service], api: Any) -> None:
    demo = service()
    demo.settle(1)
    api.delete("InferenceService", demo.namespace, "demo")
    kinds = ("InferenceService", "Pod", "Deployment", "Service", "Secret", "RoleBinding")
    demo.eventually(lambda: not any(api.list(kind, demo.namespace) for kind in kinds), 90)
    accounts = [account["metadata"]["name"] for account in api.list("ServiceAccount", demo.namespace)]
    assert accounts in ([], ["default"])


def test_a_service_of_the_same_name_may_follow_at_once(
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


def test_drift_is_repaired(service: Callable[..., Service], api: Any) -> None:
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
def test_what_no_watch_tells_of_comes_back_when_a_pod_may_need_it(
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


def test_gateways_that_hold_older_keys_are_named(
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


def test_what_belongs_to_others_is_left_alone(
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


def test_a_pod_of_anothers_that_has_the_name_is_left_alone_and_passed_over(
    service: Callable[..., Service], api: Any
) -> None:
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


def test_a_pod_that_the_api_server_rejects_shows_why(service: Callable[..., Service]) -> None:
    demo = service(podTemplate={"volumes": [{"name": "data", "hostPath": {"path": "../x"}}]})
    demo.eventually(lambda: demo.condition("Failed")["reason"] == "PodRejected")
    assert "hostPath" in demo.condition("Failed")["message"]
    demo.patch(podTemplate={"volumes": []})
    demo.settle(1)


def revisions(demo: Service) -> dict[str, int]:
    """The numbers of a service's ControllerRevisions, by revision."""
    found = demo.api.list("ControllerRevision", demo.namespace, "mizzen.dev/service=demo")
    assert all(one["metadata"]["name"] == f"demo-{label(one, 'revision')}" for one in found)
    return {label(one, "revision"): one["revision"] for one in found}


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


def test_a_partition_holds_and_restores_the_old_revision(service: Callable[..., Service]) -> None:
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
    [made] = [
        pod
        for pod in demo.pods()
        if label(pod, "revision") == old and pod["metadata"]["uid"] != kept["metadata"]["uid"]
    ]
    assert made["spec"]["containers"][0]["args"] == kept["spec"]["containers"][0]["args"]
    demo.patch(rollout={"partition": 0})
    demo.settle(2)
    assert {label(pod, "revision") for pod in demo.pods()} == {demo.status()["updateRevision"]} != {old}


def evict(demo: Service, name: str) -> int:
    """Ask for a pod's eviction; returns the API server's code."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    try:
        demo.api.request("POST", f"/api/v1/namespaces/{demo.namespace}/pods/{name}/eviction", body)
    except Exception as error:
        return int(error.code)  # type: ignore[attr-defined]
    return 201


def allowed(demo: Service, name: str) -> int:
    """Evictions that a budget of this generation allows now; -1 before it counts all of its pods as healthy.

    Until then none is allowed either, but by other rules: a pod that is not ready may always go.
    """
    budget = demo.api.find("PodDisruptionBudget", demo.namespace, name)
    if budget is None or budget["status"].get("observedGeneration") != budget["metadata"]["generation"]:
        return -1
    counted = budget["status"]
    return counted["disruptionsAllowed"] if counted["currentHealthy"] == counted["expectedPods"] else -1


def test_evictions_take_no_group_that_must_serve(service: Callable[..., Service], node: Any) -> None:
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


def test_a_group_that_fails_too_often_is_given_up_until_the_spec_changes(
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


WRITES = ("POST", "PUT", "PATCH", "APPLY", "DELETE")
IDLE_SECONDS = 20.0
NOT_OURS = ("leases", "tokenreviews", "subjectaccessreviews")


def writes(api: Any) -> dict[tuple[str, str], float]:
    """Writing requests that the API server has counted, but those to Leases and of tokens."""
    counts: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(api.text("/metrics")):
        for sample in family.samples if family.name == "apiserver_request" else ():
            label = sample.labels
            if label["verb"] in WRITES and label["resource"] not in NOT_OURS:
                key = (label["verb"], f"{label['resource']}/{label['subresource']}")
                counts[key] = counts.get(key, 0) + sample.value
    return counts


def test_idle_means_no_write_and_kopf_leaves_no_trace(
    service: Callable[..., Service], api: Any, operators: Any
) -> None:
    demo = service(replicas=2)
    demo.settle(2)
    demo.eventually(lambda: not [p for p in demo.pods() if "deletionTimestamp" in p["metadata"]])
    demo.eventually(lambda: none_ends(api), 120, "namespaces of tests before this one end")
    assert writes(api)["POST", "inferenceservices/"] > 0
    assert writes(api)["APPLY", "inferenceservices/status"] > 0

    def requests() -> tuple[object, object]:
        return writes(api), api_requests(operators.http(operators.leader(), "/metrics"))

    def idle() -> bool:
        before = requests()
        time.sleep(IDLE_SECONDS)
        return requests() == before

    # What other tests left may still be under way, and a regular look may fall into one of the times.
    demo.eventually(idle, 8 * IDLE_SECONDS, "neither a write nor a read")
    for kind in ("InferenceService", "Pod", "Deployment", "Service", "Secret"):
        for body in api.list(kind, demo.namespace):
            meta = body["metadata"]
            assert not meta.get("finalizers"), body
            assert not [name for name in meta.get("annotations", {}) if "kopf" in name], body
            assert "kopf" not in str(meta["managedFields"]), body


def test_another_operator_takes_over_at_once_after_sigterm(
    service: Callable[..., Service], operators: Any, eventually: Callable[..., Any]
) -> None:
    demo = service()
    demo.settle(1)
    first = operators.leader()
    second = operators.start()
    eventually(lambda: operators.answers(second))
    assert operators.kill(first, signal.SIGTERM) == 0
    assert operators.leader() in ("", second)  # given back, so that nobody waits for it to run out
    eventually(lambda: operators.leader() == second)
    demo.patch(replicas=2)
    demo.settle(2)


def test_another_operator_takes_over_after_sigkill_without_double_or_lost_groups(
    service: Callable[..., Service], operators: Any, node: Any, eventually: Callable[..., Any]
) -> None:
    demo = service(replicas=2)
    demo.settle(2)
    before = set(demo.live())
    node.reset_lowest(demo.namespace)
    second = operators.start()
    demo.patch(engine={"pageSize": 64})
    demo.eventually(lambda: set(demo.live()) - before)
    operators.kill(operators.leader())
    eventually(lambda: operators.leader() == second)
    demo.settle(2)
    assert node.lowest[demo.namespace] == 2
    ours = [name for name in node.names if name.startswith(f"{demo.namespace}/demo-")]
    assert len(ours) == len(set(ours))


def test_health_and_metrics(operators: Any) -> None:
    leader = operators.leader()
    assert operators.http(leader, "/healthz") == "ok\n"
    assert operators.http(leader, "/readyz") == "ok\n"
    families = {f.name: f for f in text_string_to_metric_families(operators.http(leader, "/metrics"))}
    assert families["mizzen_operator_leader"].samples[0].value == 1
    assert families["mizzen_operator_workqueue_depth"].samples[0].value >= 0
    ages = {s.labels["kind"]: s.value for s in families["mizzen_operator_watch_last_success_seconds"].samples}
    assert set(ages) == {"inferenceservices", "pods", "deployments", "services"}
    assert max(ages.values()) < 300
    # Not every traceback: kopf and aiohttp log some of their own where the API server was made to fail.
    assert not re.findall(r".*(?:unexpected error|the controller failed).*", operators.log())
