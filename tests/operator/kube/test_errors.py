# SPDX-License-Identifier: Apache-2.0
"""Groups of a service are still managed while the API server rejects another object of the service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from marks import CONTROL_PLANE

pytestmark = CONTROL_PLANE

TOO_MUCH = {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}
"""Resources that every API server rejects, because the CPU request exceeds the CPU limit."""
CACHE = {"mode": "PersistentVolumeClaim", "claimName": "weights", "size": "10Gi"}


class Harbour:
    """Services of one namespace, and queries about them."""

    def __init__(self, api: Any, node: Any, namespace: str, minimal: Any, eventually: Any) -> None:
        self.api, self.node, self.namespace = api, node, namespace
        self._minimal, self.eventually = minimal, eventually

    def create(self, name: str, **spec: Any) -> None:
        body = self._minimal(name, **{"engine": {"device": "CPU"}, "gateway": {"replicas": 1}, **spec})
        body["metadata"]["namespace"] = self.namespace
        self.api.create(body)

    def patch(self, name: str, **spec: Any) -> None:
        self.api.patch("InferenceService", self.namespace, name, {"spec": spec})

    def condition(self, name: str, kind: str) -> tuple[str, str]:
        status = self.api.get("InferenceService", self.namespace, name).get("status", {})
        conditions = status.get("conditions", [])
        return next(((c["status"], c["reason"]) for c in conditions if c["type"] == kind), ("Absent", ""))

    def wait_for_condition(self, name: str, kind: str, status: str, reason: str) -> None:
        self.eventually(
            lambda: self.condition(name, kind) == (status, reason), 120, f"{name} {kind} {reason}"
        )

    def pods(self, name: str) -> set[str]:
        selector = f"mizzen.dev/component=engine,mizzen.dev/service={name}"
        pods = self.api.list("Pod", self.namespace, selector)
        return {pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}

    def serves(self, name: str, groups: int) -> bool:
        body = self.api.get("InferenceService", self.namespace, name)
        return body.get("status", {}).get("availableReplicas") == groups == len(self.pods(name))

    def lose_pod(self, name: str, groups: int) -> None:
        """Delete the pod of one group; wait until a new group replaces it and `groups` groups serve."""
        before = self.pods(name)
        self.api.delete("Pod", self.namespace, min(before))
        self.eventually(lambda: len(self.pods(name) - before) == 1, 60, "the pod is replaced")
        self.eventually(lambda: self.serves(name, groups), 60, f"{groups} groups serve")


@pytest.fixture
def harbour(
    api: Any, node: Any, operators: Any, namespace: str, minimal: Callable[..., Any], eventually: Any
) -> Iterator[Harbour]:
    yield Harbour(api, node, namespace, minimal, eventually)
    node.behaviour = type(node.behaviour)()
    for body in api.list("InferenceService", namespace):
        api.delete("InferenceService", namespace, body["metadata"]["name"])


def test_groups_are_replaced_while_a_change_of_the_gateway_is_rejected(harbour: Harbour) -> None:
    harbour.create("demo", replicas=2)
    harbour.wait_for_condition("demo", "Ready", "True", "AllGroupsServing")
    harbour.patch("demo", gateway={"resources": TOO_MUCH})
    harbour.wait_for_condition("demo", "Failed", "True", "Rejected")
    assert harbour.condition("demo", "Available") == ("True", "Serving")
    harbour.lose_pod("demo", 2)
    assert harbour.condition("demo", "Failed") == ("True", "Rejected")
    harbour.patch("demo", gateway={"resources": {"requests": {"cpu": "1"}}})
    harbour.wait_for_condition("demo", "Ready", "True", "AllGroupsServing")


def test_groups_are_replaced_while_a_shared_gateway_is_rejected_because_of_another_service(
    harbour: Harbour,
) -> None:
    shared = {"mode": "Shared", "replicas": 1}
    for name in ("first", "second"):
        harbour.create(name, gateway=shared, replicas=2)
        harbour.wait_for_condition(name, "Ready", "True", "AllGroupsServing")
    harbour.patch("first", gateway={"resources": TOO_MUCH})
    harbour.wait_for_condition("first", "Failed", "True", "Rejected")
    harbour.lose_pod("second", 2)
    harbour.patch("first", gateway={"resources": None})
    harbour.wait_for_condition("first", "Ready", "True", "AllGroupsServing")


def test_groups_are_replaced_while_the_cache_of_the_next_model_is_rejected(harbour: Harbour) -> None:
    result = {"result": {"revision": "0123456789abcdef0123456789abcdef01234567", "bytes": 1000, "files": 3}}
    harbour.node.behaviour.fetches[harbour.namespace] = result
    harbour.create("demo", replicas=2, model={"source": "hf://Qwen/Qwen3-0.6B@main", "cache": CACHE})
    harbour.wait_for_condition("demo", "Ready", "True", "AllGroupsServing")
    none = {"claimName": "none", "size": "0Gi"}
    harbour.patch("demo", model={"source": "hf://Qwen/Qwen3-1.7B@main", "cache": none})
    harbour.wait_for_condition("demo", "Failed", "True", "PersistentVolumeClaimRejected")
    assert harbour.condition("demo", "ModelCached") == ("False", "DownloadFailed")
    harbour.lose_pod("demo", 2)
    harbour.patch("demo", model={"cache": {"size": "10Gi"}})
    harbour.wait_for_condition("demo", "Ready", "True", "AllGroupsServing")
