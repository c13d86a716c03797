"""What the cluster does not take of a service leaves alone what serves: it is looked after all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from marks import CONTROL_PLANE

pytestmark = CONTROL_PLANE

TOO_MUCH = {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}
"""Resources that no API server takes."""
CACHE = {"mode": "PersistentVolumeClaim", "claimName": "weights", "size": "10Gi"}


class Harbour:
    """Services of one namespace."""

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
        found = [c for c in status.get("conditions", []) if c["type"] == kind]
        return (found[0]["status"], found[0]["reason"]) if found else ("Absent", "")

    def becomes(self, name: str, kind: str, status: str, reason: str) -> None:
        self.eventually(
            lambda: self.condition(name, kind) == (status, reason), 120, f"{name} {kind} {reason}"
        )

    def pods(self, name: str) -> set[str]:
        selector = f"mizzen.dev/component=engine,mizzen.dev/service={name}"
        pods = self.api.list("Pod", self.namespace, selector)
        return {one["metadata"]["name"] for one in pods if "deletionTimestamp" not in one["metadata"]}

    def serves(self, name: str, groups: int) -> bool:
        body = self.api.get("InferenceService", self.namespace, name)
        return body.get("status", {}).get("availableReplicas") == groups == len(self.pods(name))

    def loses_one(self, name: str, groups: int) -> None:
        """A group goes, and another one takes its place."""
        before = self.pods(name)
        self.api.delete("Pod", self.namespace, min(before))
        self.eventually(lambda: len(self.pods(name) - before) == 1, 60, "its place is taken")
        self.eventually(lambda: self.serves(name, groups), 60, f"{groups} groups serve")


@pytest.fixture
def harbour(
    api: Any, node: Any, operators: Any, namespace: str, minimal: Callable[..., Any], eventually: Any
) -> Iterator[Harbour]:
    made = Harbour(api, node, namespace, minimal, eventually)
    yield made
    node.behaviour = type(node.behaviour)()
    for one in api.list("InferenceService", namespace):
        api.delete("InferenceService", namespace, one["metadata"]["name"])


def test_groups_are_made_anew_while_a_change_of_the_gateway_is_rejected(harbour: Harbour) -> None:
    harbour.create("demo", replicas=2)
    harbour.becomes("demo", "Ready", "True", "AllGroupsServing")
    harbour.patch("demo", gateway={"resources": TOO_MUCH})
    harbour.becomes("demo", "Failed", "True", "Rejected")
    assert harbour.condition("demo", "Available") == ("True", "Serving")
    harbour.loses_one("demo", 2)
    assert harbour.condition("demo", "Failed") == ("True", "Rejected")
    harbour.patch("demo", gateway={"resources": {"requests": {"cpu": "1"}}})
    harbour.becomes("demo", "Ready", "True", "AllGroupsServing")


def test_one_services_mistake_in_a_shared_gateway_costs_the_others_nothing(harbour: Harbour) -> None:
    shared = {"mode": "Shared", "replicas": 1}
    for name in ("first", "second"):
        harbour.create(name, gateway=shared, replicas=2)
        harbour.becomes(name, "Ready", "True", "AllGroupsServing")
    harbour.patch("first", gateway={"resources": TOO_MUCH})
    harbour.becomes("first", "Failed", "True", "Rejected")
    harbour.loses_one("second", 2)
    harbour.patch("first", gateway={"resources": None})
    harbour.becomes("first", "Ready", "True", "AllGroupsServing")


def test_groups_are_made_anew_while_the_next_models_cache_is_rejected(harbour: Harbour) -> None:
    result = {"result": {"revision": "0123456789abcdef0123456789abcdef01234567", "bytes": 1000, "files": 3}}
    harbour.node.behaviour.fetches[harbour.namespace] = result
    harbour.create("demo", replicas=2, model={"source": "hf://Qwen/Qwen3-0.6B@main", "cache": CACHE})
    harbour.becomes("demo", "Ready", "True", "AllGroupsServing")
    none = {"claimName": "none", "size": "0Gi"}
    harbour.patch("demo", model={"source": "hf://Qwen/Qwen3-1.7B@main", "cache": none})
    harbour.becomes("demo", "Failed", "True", "PersistentVolumeClaimRejected")
    assert harbour.condition("demo", "ModelCached") == ("False", "DownloadFailed")
    harbour.loses_one("demo", 2)
    harbour.patch("demo", model={"cache": {"size": "10Gi"}})
    harbour.becomes("demo", "Ready", "True", "AllGroupsServing")
