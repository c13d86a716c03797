# SPDX-License-Identifier: Apache-2.0
"""The operator creates children without reading them first, but never takes over an existing object."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import load_kube_config

from live_service import Service
from marks import CONTROL_PLANE
from mizzen_local.controlplane import ControlPlane
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import KubeError
from mizzen_operator.metrics import Metrics

pytestmark = CONTROL_PLANE

LABELS = {"app": "other"}
ROLE = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"}
CONTAINER = {"name": "a", "image": "a"}
TEMPLATE = {"metadata": {"labels": LABELS}, "spec": {"containers": [CONTAINER]}}
OTHERS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("ServiceAccount", "v1", "demo-gateway", {}),
    ("RoleBinding", "rbac.authorization.k8s.io/v1", "demo-gateway", {"roleRef": ROLE}),
    ("Service", "v1", "demo-gateway", {"spec": {"ports": [{"port": 1}], "selector": LABELS}}),
    (
        "Deployment",
        "apps/v1",
        "demo-gateway",
        {"spec": {"replicas": 0, "selector": {"matchLabels": LABELS}, "template": TEMPLATE}},
    ),
    ("PodDisruptionBudget", "policy/v1", "demo-engine", {"spec": {"selector": {"matchLabels": LABELS}}}),
    ("PodDisruptionBudget", "policy/v1", "demo-gateway", {"spec": {"selector": {"matchLabels": LABELS}}}),
    ("NetworkPolicy", "networking.k8s.io/v1", "demo-engine", {"spec": {"podSelector": {}}}),
]
"""Kind, API version, name and content of objects that exist before the service does."""


def other(namespace: str, kind: str, version: str, name: str, content: dict[str, Any]) -> dict[str, Any]:
    meta = {"name": name, "namespace": namespace, "labels": LABELS}
    return {"apiVersion": version, "kind": kind, "metadata": meta, **content}


@pytest.fixture
async def kube(control_plane: ControlPlane) -> AsyncIterator[KubeClient]:
    configuration = Configuration()
    await load_kube_config(str(control_plane.kubeconfig), client_configuration=configuration)
    client = KubeClient(configuration, Metrics())
    yield client
    await client.close()


@pytest.mark.parametrize("existing", OTHERS, ids=lambda existing: f"{existing[0]} {existing[2]}")
async def test_an_apply_of_a_new_object_does_not_change_an_existing_one(
    api: Any, kube: KubeClient, namespace: str, existing: tuple[str, str, str, dict[str, Any]]
) -> None:
    body = other(namespace, *existing)
    created = await kube.apply(body, new=True)
    assert {entry["operation"] for entry in created["metadata"]["managedFields"]} == {"Apply"}
    with pytest.raises(KubeError) as refused:
        await kube.apply({**body, "metadata": {**body["metadata"], "labels": {"app": "ours"}}}, new=True)
    assert refused.value.code == 409
    metadata = api.get(existing[0], namespace, existing[2])["metadata"]
    assert (metadata["labels"], metadata["uid"]) == (LABELS, created["metadata"]["uid"])


@pytest.mark.parametrize(
    ("name", "secret"), [("demo-engine", "demo-engine-keys"), ("demo-gateway", "demo-gateway-keys")]
)
def test_if_childrens_names_of_two_services_clash_the_later_service_reports_it(
    live_service: Callable[..., Service],
    api: Any,
    namespace: str,
    minimal: Callable[..., dict[str, Any]],
    eventually: Callable[..., Any],
    name: str,
    secret: str,
) -> None:
    demo = live_service()
    demo.settle(1)
    before = api.get("Secret", namespace, secret)["metadata"]["uid"]
    body = minimal(name, engine={"device": "CPU"}, gateway={"replicas": 1})
    body["metadata"]["namespace"] = namespace
    api.create(body)

    def failed() -> str:
        status = api.get("InferenceService", namespace, name).get("status", {})
        [condition] = [c for c in status.get("conditions", []) if c["type"] == "Failed"] or [{"reason": ""}]
        return condition["message"] if condition["reason"] == "NameTaken" else ""

    message = eventually(failed, 60, "the condition Failed has the reason NameTaken")
    assert f"Secret {secret} belongs to InferenceService demo, which has a child of that name" in message
    assert "apply this one under another name" in message and "delete" not in message
    api.delete("InferenceService", namespace, name)
    assert api.get("Secret", namespace, secret)["metadata"]["uid"] == before


@pytest.mark.parametrize("existing", OTHERS, ids=lambda existing: f"{existing[0]} {existing[2]}")
def test_a_new_service_does_not_take_over_existing_objects(
    live_service: Callable[..., Service],
    api: Any,
    namespace: str,
    existing: tuple[str, str, str, dict[str, Any]],
) -> None:
    kind, _, name, _ = existing
    before = api.create(other(namespace, *existing))
    demo = live_service(networkPolicy="Enabled")
    demo.eventually(lambda: demo.condition("Failed")["reason"] == "NameTaken")
    assert f"{kind} {name} belongs to something else" in demo.condition("Failed")["message"]
    metadata = api.get(kind, namespace, name)["metadata"]
    assert metadata["labels"] == LABELS and "ownerReferences" not in metadata
    assert metadata["uid"] == before["metadata"]["uid"]
    api.delete(kind, namespace, name)
    demo.settle(1)
