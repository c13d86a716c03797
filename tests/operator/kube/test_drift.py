# SPDX-License-Identifier: Apache-2.0
"""Children that are edited or deleted by hand: the operator reverts edits and recreates deleted children."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from live_service import Service
from marks import CONTROL_PLANE
from mizzen_operator.api.labels import SERVICE_ACCOUNT_UID
from mizzen_operator.kube.drift import drift_patch

pytestmark = CONTROL_PLANE

CHILDREN = Path(__file__).parents[2] / "golden/data/operator_children.json"
"""Recorded manifests of the children of several services."""
META = ("name", "namespace", "labels", "annotations", "ownerReferences")
SECONDS = 20.0
"""Timeout of each wait; the operator of these tests polls unwatched children once a second."""


class ChildObjects:
    """The children of a serving service with its own gateway and NetworkPolicies."""

    def __init__(self, api: Any, namespace: str, eventually: Callable[..., Any]) -> None:
        self.api, self.namespace, self.eventually = api, namespace, eventually

    def settled(self) -> bool:
        status = self.api.get("InferenceService", self.namespace, "demo").get("status", {})
        ready = [c for c in status.get("conditions", []) if c["type"] == "Ready" and c["status"] == "True"]
        return bool(ready) and status["availableReplicas"] == 1

    def spec(self, kind: str, name: str) -> dict[str, Any]:
        return self.api.get(kind, self.namespace, name)["spec"]

    def edit(self, kind: str, name: str, patch: Any, **options: Any) -> dict[str, Any]:
        return self.api.patch(kind, self.namespace, name, patch, **options)

    def wait_for_spec(self, kind: str, name: str, before: Any) -> None:
        self.eventually(lambda: self.spec(kind, name) == before, SECONDS, f"{kind} {name} is {before} again")


@pytest.fixture
def child(live_service: Callable[..., Service]) -> ChildObjects:
    demo = live_service(networkPolicy="Enabled")
    children = ChildObjects(demo.api, demo.namespace, demo.eventually)
    children.eventually(children.settled, 90, "the service serves")
    return children


ADDED: list[tuple[str, str, Any]] = [
    ("Service", "demo-gateway", {"spec": {"selector": {"foo": "bar"}}}),
    ("Deployment", "demo-gateway", {"spec": {"template": {"spec": {"nodeSelector": {"no": "such"}}}}}),
    ("Deployment", "demo-gateway", {"spec": {"template": {"spec": {"hostNetwork": True}}}}),
    ("Deployment", "demo-gateway", {"spec": {"paused": True}}),
    ("NetworkPolicy", "demo-gateway", {"spec": {"egress": [{}], "policyTypes": ["Ingress", "Egress"]}}),
    ("PodDisruptionBudget", "demo-gateway", {"spec": {"minAvailable": None, "maxUnavailable": "100%"}}),
]
"""Kind and name of a child, and the patch that is merged into it by hand."""


@pytest.mark.parametrize(("kind", "name", "patch"), ADDED)
def test_a_field_added_by_hand_is_removed(child: ChildObjects, kind: str, name: str, patch: Any) -> None:
    before = child.spec(kind, name)
    child.edit(kind, name, patch)
    child.wait_for_spec(kind, name, before)


def test_a_list_item_added_by_hand_is_removed(child: ChildObjects) -> None:
    strategic = "application/strategic-merge-patch+json"
    before = child.spec("Service", "demo-gateway")
    more = {"spec": {"ports": [{"name": "more", "port": 9, "targetPort": 9}]}}
    child.edit("Service", "demo-gateway", more, content_type=strategic)
    child.wait_for_spec("Service", "demo-gateway", before)
    before = child.spec("Deployment", "demo-gateway")
    container = {"name": "gateway", "env": [{"name": "HOME", "value": "/"}, {"name": "MORE", "value": "1"}]}
    sidecar = {"name": "more", "image": "more"}
    more = {"spec": {"template": {"spec": {"containers": [container, sidecar]}}}}
    child.edit("Deployment", "demo-gateway", more, content_type=strategic)
    child.wait_for_spec("Deployment", "demo-gateway", before)


def test_a_policy_that_admits_everything_is_reverted(child: ChildObjects) -> None:
    before = child.spec("NetworkPolicy", "demo-engine")
    child.edit("NetworkPolicy", "demo-engine", {"spec": {"ingress": [*before["ingress"], {}]}})
    child.wait_for_spec("NetworkPolicy", "demo-engine", before)


def recorded_children(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the manifests of all kinds of children in a golden file."""
    if isinstance(value, dict) and "kind" in value and "metadata" in value:
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from recorded_children(item)


def test_defaults_of_the_api_server_are_not_drift(api: Any) -> None:
    kinds = ("Service", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "RoleBinding", "ConfigMap")
    manifests = {
        json.dumps([entry["kind"], entry["metadata"]["name"], entry.get("spec")]): entry
        for entry in recorded_children(json.loads(CHILDREN.read_text()))
        if entry["kind"] in kinds
    }
    assert any(entry["metadata"]["name"].endswith("-ranks") for entry in manifests.values())
    for manifest in manifests.values():
        body = {**manifest, "metadata": {**manifest["metadata"], "namespace": "default"}}
        stored = api.create(body, dryRun="All")
        assert drift_patch({**stored, "metadata": {"resourceVersion": ""}}, body) is None, stored


def test_an_additional_subject_of_a_binding_is_removed(child: ChildObjects) -> None:
    def subjects() -> Any:
        return child.api.get("RoleBinding", child.namespace, "demo-gateway")["subjects"]

    before = subjects()
    other = {"kind": "ServiceAccount", "name": "other", "namespace": "default"}
    child.edit("RoleBinding", "demo-gateway", {"subjects": [*before, other]})
    child.eventually(lambda: subjects() == before, SECONDS, "only the gateway is bound")


def test_a_binding_to_another_role_is_recreated(child: ChildObjects) -> None:
    """The role of a binding is immutable; an upgrade may give the gateways' role another name."""
    before = child.api.get("RoleBinding", child.namespace, "demo-gateway")
    kept = {key: before["metadata"][key] for key in META}
    child.api.delete("RoleBinding", child.namespace, "demo-gateway")
    former = {**before, "metadata": kept, "roleRef": {**before["roleRef"], "name": "former-gateway"}}
    child.api.create(former)

    def role() -> str:
        binding = child.api.find("RoleBinding", child.namespace, "demo-gateway")
        return binding["roleRef"]["name"] if binding else ""

    child.eventually(lambda: role() == before["roleRef"]["name"], SECONDS, "the operator's role is bound")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("PodDisruptionBudget", "demo-engine"),
        ("PodDisruptionBudget", "demo-gateway"),
        ("NetworkPolicy", "demo-engine"),
        ("NetworkPolicy", "demo-gateway"),
        ("RoleBinding", "demo-gateway"),
        ("ServiceAccount", "demo-gateway"),
    ],
)
def test_a_deleted_unwatched_child_is_recreated(child: ChildObjects, kind: str, name: str) -> None:
    child.api.delete(kind, child.namespace, name)
    child.eventually(lambda: child.api.find(kind, child.namespace, name), SECONDS, "the child exists again")


def test_gateway_pods_are_replaced_if_their_service_account_is_recreated(child: ChildObjects) -> None:
    """The tokens of the old pods are bound to the deleted account, so the API server rejects these tokens."""

    def accounts() -> tuple[str, list[str]]:
        account = child.api.find("ServiceAccount", child.namespace, "demo-gateway") or {"metadata": {}}
        pods = child.api.list("Pod", child.namespace, "mizzen.dev/component=gateway")
        metas = [pod["metadata"] for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        return account["metadata"].get("uid", ""), [
            meta["annotations"][SERVICE_ACCOUNT_UID] for meta in metas
        ]

    first, bound = accounts()
    assert bound == [first]
    child.api.delete("ServiceAccount", child.namespace, "demo-gateway")

    def renewed() -> bool:
        account, bound = accounts()
        return account not in ("", first) and bound == [account]

    child.eventually(renewed, 60, "the gateway's pods have tokens of the new account")
    child.eventually(child.settled, 60, "the service serves")
    generation = child.api.get("Deployment", child.namespace, "demo-gateway")["metadata"]["generation"]
    time.sleep(3)
    gateway = child.api.get("Deployment", child.namespace, "demo-gateway")
    assert gateway["metadata"]["generation"] == generation, "the pods are replaced only once"


def test_restarts_labels_and_annotations_of_users_are_kept(child: ChildObjects) -> None:
    """A `kubectl rollout restart`, labels and annotations from users, and default values are not drift."""
    restarted = {"kubectl.kubernetes.io/restartedAt": "2026-01-01T00:00:00Z"}
    child.edit(
        "Deployment",
        "demo-gateway",
        {
            "metadata": {"labels": {"team": "a"}},
            "spec": {"template": {"metadata": {"annotations": restarted}}},
        },
    )
    child.edit("Service", "demo-gateway", {"metadata": {"annotations": {"team": "a"}}})
    child.eventually(child.settled, 90, "the service serves")
    child.edit("Deployment", "demo-gateway", {"spec": {"replicas": 3}})  # causes a comparison
    child.eventually(lambda: child.spec("Deployment", "demo-gateway")["replicas"] == 1)
    deployment = child.api.get("Deployment", child.namespace, "demo-gateway")
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert {name: value for name, value in annotations.items() if name != SERVICE_ACCOUNT_UID} == restarted
    assert deployment["metadata"]["labels"]["team"] == "a"
    service = child.api.get("Service", child.namespace, "demo-gateway")
    assert service["metadata"]["annotations"]["team"] == "a"


AMOUNTS = {
    "requests": {"cpu": "1000m", "memory": "1024Mi", "ephemeral-storage": "1000M"},
    "limits": {"cpu": "2.0000001", "memory": "1.5Gi", "ephemeral-storage": "2e9"},
}
STORED = {
    "requests": {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "1G"},
    "limits": {"cpu": "2001m", "memory": "1536Mi", "ephemeral-storage": "2e9"},
}
"""The quantities of AMOUNTS in the canonical form in which the API server stores them."""


def test_a_quantity_in_canonical_form_is_not_drift(
    live_service: Callable[..., Service], operators: Any
) -> None:
    def count(name: str) -> float:
        lines = operators.http(operators.leader(), "/metrics").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def resources() -> Any:
        deployment = demo.api.get("Deployment", demo.namespace, "demo-gateway")
        return deployment["spec"]["template"]["spec"]["containers"][0]["resources"]

    demo = live_service(gateway={"replicas": 1, "resources": AMOUNTS})
    demo.settle(1)
    assert resources() == STORED
    applied = count('mizzen_operator_actions_total{action="ApplyDeployment"}')
    for number in range(3):  # a foreign label causes a reconcile
        reconciles = count("mizzen_operator_reconcile_duration_seconds_count")
        meta = {"metadata": {"labels": {"round": str(number)}}}
        demo.api.patch("Deployment", demo.namespace, "demo-gateway", meta)
        demo.eventually(lambda n=reconciles: count("mizzen_operator_reconcile_duration_seconds_count") > n)
    assert count('mizzen_operator_actions_total{action="ApplyDeployment"}') == applied
    halved = {"name": "gateway", "resources": {"requests": {"cpu": "500m"}}}
    patch = {"spec": {"template": {"spec": {"containers": [halved]}}}}
    strategic = "application/strategic-merge-patch+json"
    demo.api.patch("Deployment", demo.namespace, "demo-gateway", patch, content_type=strategic)
    demo.eventually(lambda: resources() == STORED, SECONDS, "the quantity of the spec is restored")
