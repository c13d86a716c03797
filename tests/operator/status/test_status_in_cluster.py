# SPDX-License-Identifier: Apache-2.0
"""The status of a running service names the object or setting that blocks the service."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from live_service import Service
from marks import CONTROL_PLANE

pytestmark = CONTROL_PLANE


def series(operators: Any, namespace: str, name: str, **labels: str) -> float | None:
    """Return the value of a service's series in the leading operator's metrics; None if it is absent."""
    text = operators.http(operators.leader(), "/metrics")
    return next(
        (
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"mizzen_operator_{name}"
            and sample.labels.get("namespace") == namespace
            and labels.items() <= sample.labels.items()
        ),
        None,
    )


def test_a_rollout_without_progress_is_overdue_and_not_complete(
    live_service: Callable[..., Service], node: Any, operators: Any, namespace: str
) -> None:
    demo = live_service(rollout={"progressDeadlineSeconds": 10})
    demo.settle(1)
    before = demo.live()
    assert series(operators, namespace, "rollout_overdue_seconds") == 0
    node.behaviour.start = 3600.0
    demo.patch(engine={"pageSize": 32})
    demo.eventually(lambda: demo.condition("Progressing")["reason"] == "ProgressDeadlineExceeded")
    demo.eventually(
        lambda: series(operators, namespace, "rollout_overdue_seconds"), expectation="the rollout is overdue"
    )
    assert demo.condition("Ready")["reason"] == "ProgressDeadlineExceeded"
    # The deadline counts from a time in the status, which has whole seconds, so it may pass up to 1 s early.
    demo.eventually(lambda: (series(operators, namespace, "rollout_age_seconds") or 0) >= 10)
    assert set(before) <= set(demo.live())
    node.behaviour.start = 0.2
    demo.settle(1)
    assert series(operators, namespace, "rollout_overdue_seconds") == 0


def test_a_crashing_gateway_is_reported_with_its_cause_and_restarts(
    live_service: Callable[..., Service], node: Any, operators: Any, namespace: str
) -> None:
    demo = live_service()
    demo.settle(1)
    node.behaviour.broken_models.add("--no-such-option")
    demo.patch(gateway={"extraArgs": ["--no-such-option"]})
    demo.eventually(lambda: demo.condition("Failed")["status"] == "True")
    failed, ready = demo.condition("Failed"), demo.condition("Ready")
    assert (failed["reason"], ready["reason"]) == ("GatewayFailing", "GatewayFailing")
    for words in (
        "demo-gateway-",
        "CrashLoopBackOff, restarted 3 times: ",
        "no config.json in the model's folder",
    ):
        assert words in failed["message"]
    assert demo.condition("Available")["status"] == "True", "the gateway of the template before serves on"
    demo.eventually(lambda: series(operators, namespace, "service_condition", condition="Failed") == 1)
    demo.patch(gateway={"extraArgs": []})
    demo.settle(1)
    assert demo.condition("Failed")["reason"] == "AsExpected"


def test_an_unschedulable_group_is_the_reason_of_ready(
    live_service: Callable[..., Service], node: Any, namespace: str
) -> None:
    node.behaviour.unschedulable.add(namespace)
    demo = live_service(replicas=2)
    demo.eventually(lambda: demo.condition("Ready")["reason"] == "Unschedulable")
    assert "0/1 nodes are available: 1 Insufficient cpu." in demo.condition("Ready")["message"]
    assert demo.condition("Scheduled")["reason"] == "Unschedulable"
    assert demo.condition("Progressing")["reason"] == "StartingGroups"
    node.behaviour.unschedulable.clear()
    demo.settle(2)
    assert demo.condition("Scheduled")["message"] == "2 of 2 groups have a node"
    demo.patch(replicas=0)
    demo.eventually(lambda: demo.condition("Scheduled")["reason"] == "NoGroupsWanted")
    assert demo.condition("Scheduled")["status"] == "True"


def stable_fields(demo: Service) -> dict[str, Any]:
    """Return a status without the fields that hold changing times."""
    return {key: value for key, value in demo.status().items() if key not in ("conditions", "progress")}


ADDED = {"status": "True", "reason": "ByHand", "message": "m", "lastTransitionTime": "2026-01-02T03:04:05Z"}


def test_a_manual_edit_of_the_status_is_reverted_at_once(
    live_service: Callable[..., Service], api: Any, namespace: str
) -> None:
    demo = live_service()
    demo.settle(1)
    before = stable_fields(demo)
    edited = demo.body()
    edited["status"]["conditions"] += [{**ADDED, "type": "Conflict"}, {**ADDED, "type": "Odd"}]
    edited["status"]["conditions"][0] |= {"status": "False", "reason": "ByHand"}
    edited["status"]["groups"].append({"name": "odd", "group": 7, "revision": "x", "state": "Serving"})
    edited["status"] |= {"podsPerGroup": 4, "replicas": 9, "url": "http://elsewhere"}
    given_up = {"reason": "RestartBudgetExceeded", "message": "by hand", "revision": "x", "spec": "x"}
    edited["status"]["givenUp"] = {**given_up, "groups": [0]}
    path = f"/apis/mizzen.dev/v1alpha1/namespaces/{namespace}/inferenceservices/demo/status"
    api.request("PUT", path, edited, params={"fieldManager": "kubectl-edit"})

    def put_right() -> bool:
        kinds = {entry["type"]: entry["reason"] for entry in demo.status()["conditions"]}
        return (
            stable_fields(demo) == before and "Conflict" not in kinds and kinds["Ready"] == "AllGroupsServing"
        )

    demo.eventually(put_right, 10)
    assert demo.condition("Odd")["reason"] == "ByHand", "a condition that is not the operator's is left"
    version = demo.body()["metadata"]["resourceVersion"]
    time.sleep(2)
    assert demo.body()["metadata"]["resourceVersion"] == version, "and then nothing is written"


def test_unusable_api_keys_are_reported(
    live_service: Callable[..., Service], node: Any, api: Any, namespace: str
) -> None:
    demo = live_service()
    demo.settle(1)
    assert demo.condition("ApiKeysInForce")["status"] == "Absent"
    problem = "/var/run/mizzen/api-keys/teams/keys.yaml, keys[1] (b): a is the same key"
    node.behaviour.api_keys[namespace] = {"inForce": 1, "problem": problem}
    demo.eventually(lambda: demo.condition("Ready")["reason"] == "ApiKeysUnusable")
    assert problem in demo.condition("ApiKeysInForce")["message"]
    assert demo.condition("Available")["status"] == "True"
    assert demo.condition("Progressing")["reason"] == "Settled"

    def warned() -> bool:
        return any(event["reason"] == "ApiKeysUnusable" for event in api.list("Event", namespace))

    demo.eventually(warned)
    node.behaviour.api_keys[namespace] = {"inForce": 2, "problem": ""}
    demo.settle(1)
    assert demo.condition("ApiKeysInForce")["reason"] == "KeysRead"


def secret(namespace: str, name: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"a": "b"}}


def test_a_missing_secret_is_reported_with_its_field(
    live_service: Callable[..., Service], node: Any, api: Any, namespace: str
) -> None:
    node.behaviour.mounting.add(namespace)
    volumes = [{"name": "certs", "secret": {"secretName": "authority"}}]
    mounts = [{"name": "certs", "mountPath": "/certs"}]
    demo = live_service(
        podTemplate={"volumes": volumes, "volumeMounts": mounts},
        gateway={"replicas": 1, "apiKeys": {"secretNames": ["teams"]}},
    )
    demo.eventually(lambda: demo.condition("Failed")["reason"] == "ReferenceMissing")

    def reports(*words: str) -> bool:
        return all(entry in demo.condition("Failed")["message"] for entry in words)

    fields = ("spec.gateway.apiKeys.secretNames[0]", "spec.podTemplate.volumes[0].secret.secretName")
    demo.eventually(
        lambda: reports("Secret teams does not exist", "Secret authority does not exist", *fields)
    )
    assert demo.condition("Ready")["reason"] == "ReferenceMissing"
    api.create(secret(namespace, "authority"))
    demo.eventually(lambda: reports("teams") and not reports("authority"))
    api.create(secret(namespace, "teams"))
    demo.settle(1)
    assert demo.condition("Failed")["reason"] == "AsExpected"


def test_a_group_that_waits_for_its_volumes_names_the_claim_and_the_field(
    live_service: Callable[..., Service], node: Any, api: Any, namespace: str
) -> None:
    storage = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "spec": {**storage, "storageClassName": "x"},
    }
    api.create({**claim, "metadata": {"name": "models", "namespace": namespace}})
    node.behaviour.unmounted.add(namespace)
    demo = live_service(model={"source": "pvc://models/demo"})

    def reports(*words: str) -> bool:
        return all(entry in demo.condition("Ready")["message"] for entry in words)

    where = "PersistentVolumeClaim models (spec.model.source)"
    demo.eventually(lambda: reports("waits on node sim for its volumes", f"{where} is not bound"))
    assert demo.condition("Ready")["reason"] == "StartingGroups"
    api.patch("PersistentVolumeClaim", namespace, "models", {"status": {"phase": "Bound"}}, "status")
    demo.eventually(lambda: reports(f"{where} is ReadWriteOnce, so only the pods of one node"))
    node.behaviour.unmounted.clear()
    demo.settle(1)
    assert not reports("volumes")
