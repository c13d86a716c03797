# SPDX-License-Identifier: Apache-2.0
"""Engine pods whose labels were changed by hand.

A pod that was released on purpose, by removing a label, keeps running beside its replacement. A pod with
invalid labels is deleted and replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from live_service import Service
from marks import CONTROL_PLANE
from mizzen_operator.pods.observe import _has_valid_labels

pytestmark = CONTROL_PLANE


class Harbour:
    """A service with two groups, and the labels of its pods."""

    def __init__(self, api: Any, namespace: str, eventually: Callable[..., Any]) -> None:
        self.api, self.namespace, self.eventually = api, namespace, eventually

    def pods(self) -> dict[str, Any]:
        """Return the metadata of the engine pods that are not terminating, by name."""
        metadata = [pod["metadata"] for pod in self.api.list("Pod", self.namespace)]
        return {
            meta["name"]: meta
            for meta in metadata
            if "deletionTimestamp" not in meta and "gateway" not in meta["name"]
        }

    def settled(self) -> bool:
        """Return whether the service is Ready with two available groups."""
        status = self.api.get("InferenceService", self.namespace, "demo").get("status", {})
        ready = [c for c in status.get("conditions", []) if c["type"] == "Ready" and c["status"] == "True"]
        return bool(ready) and status["availableReplicas"] == status["replicas"] == 2

    def label(self, name: str, label: str, value: str | None) -> None:
        self.api.patch("Pod", self.namespace, name, {"metadata": {"labels": {label: value}}})

    def remove_label(self, label: str) -> str:
        """Remove a label from a pod, check that the pod is left alone and replaced, and return its name."""
        before = set(self.pods())
        released = min(before)
        self.label(released, label, None)
        self.eventually(lambda: len(set(self.pods()) - before) == 1, 30, "the pod is replaced")
        self.eventually(self.settled, 60, "two groups serve")
        assert released in self.pods()
        return released


@pytest.fixture
def harbour(live_service: Callable[..., Service]) -> Harbour:
    demo = live_service(replicas=2)
    harbour = Harbour(demo.api, demo.namespace, demo.eventually)
    harbour.eventually(harbour.settled, 90, "the service serves")
    return harbour


def test_a_pod_without_the_service_label_is_left_alone_and_replaced(harbour: Harbour) -> None:
    released = harbour.remove_label("mizzen.dev/service")
    assert len(harbour.pods()) == 3
    harbour.api.delete("Pod", harbour.namespace, released, gracePeriodSeconds=0)
    harbour.eventually(lambda: released not in harbour.pods(), 10)
    harbour.eventually(harbour.settled, 60, "two groups still serve")


def test_a_pod_without_the_component_label_is_left_alone_until_it_has_the_label_again(
    harbour: Harbour,
) -> None:
    released = harbour.remove_label("mizzen.dev/component")
    harbour.label(released, "mizzen.dev/component", "engine")
    harbour.eventually(
        lambda: harbour.settled() and len(harbour.pods()) == 2, 60, "the surplus pod is deleted"
    )


@pytest.mark.parametrize(
    ("label", "value"),
    [
        ("mizzen.dev/group", None),
        ("mizzen.dev/incarnation", None),
        ("mizzen.dev/incarnation", "9" * 60),
        ("mizzen.dev/pods", "2"),
        ("mizzen.dev/pods", "99999999999"),
        ("mizzen.dev/rank", "1"),
    ],
)
def test_a_pod_with_invalid_labels_is_replaced(harbour: Harbour, label: str, value: str | None) -> None:
    """If the pod were kept, gateways would route to it forever, even after changes of the spec."""
    before = set(harbour.pods())
    harbour.label(min(before), label, value)
    harbour.eventually(lambda: min(before) not in harbour.pods(), 30, "the pod is deleted")
    harbour.eventually(lambda: harbour.settled() and len(harbour.pods()) == 2, 60, "two groups serve")
    assert len(set(harbour.pods()) - before) == 1


@pytest.mark.parametrize(
    ("label", "value"),
    [
        ("mizzen.dev/rank", None),
        ("mizzen.dev/rank", "0"),
        ("mizzen.dev/rank", "9" * 60),
        ("mizzen.dev/pods", None),
        ("mizzen.dev/pods", "1"),
        ("mizzen.dev/pods", "8"),
    ],
)
def test_a_pod_of_a_multi_pod_group_with_invalid_labels_is_replaced(
    live_service: Callable[..., Service], label: str, value: str | None
) -> None:
    demo = live_service(parallelism={"tensor": 2}, accelerator={"perPod": 1})
    demo.eventually(lambda: demo.condition("Ready")["status"] == "True", 90, "the service serves")
    [second] = [pod for pod in demo.pods() if pod["metadata"]["labels"]["mizzen.dev/rank"] == "1"]
    patch = {"metadata": {"labels": {label: value}}}
    demo.api.patch("Pod", demo.namespace, second["metadata"]["name"], patch)

    def whole() -> bool:
        pods = demo.pods()
        ranks = sorted(pod["metadata"]["labels"].get("mizzen.dev/rank", "") for pod in pods)
        gone = second["metadata"]["uid"] not in {pod["metadata"]["uid"] for pod in pods}
        return gone and ranks == ["0", "1"] and demo.condition("Ready")["status"] == "True"

    demo.eventually(whole, 90, "a complete group serves")


def test_a_pod_whose_arguments_admission_has_replaced_is_judged_by_its_labels() -> None:
    """Admission may wrap the engine's command; then the container's arguments no longer show the rank."""
    group_labels = {"mizzen.dev/rank": "1", "mizzen.dev/pods": "2"}
    wrapped = pod(group_labels, ["sh", "-c", "mizzen engine --nodes 2"])
    assert _has_valid_labels(wrapped)
    assert _has_valid_labels(pod(group_labels, ["engine", "--nodes", "2", "--node-rank", "1"]))
    assert not _has_valid_labels(pod(group_labels, ["engine", "--nodes", "2", "--node-rank", "0"]))
    assert not _has_valid_labels(pod({**group_labels, "mizzen.dev/pods": "99999"}, ["sh"]))
    assert _has_valid_labels(pod({}, ["engine", "--model", "x"])), (
        "an earlier release gave single pods no rank"
    )


def pod(labels: dict[str, str], arguments: list[str]) -> dict[str, Any]:
    numbers = {"mizzen.dev/group": "0", "mizzen.dev/incarnation": "0", "mizzen.dev/revision": "a"}
    containers = [
        {"name": "helper", "args": ["engine", "--nodes", "7"]},
        {"name": "engine", "args": arguments},
    ]
    return {"metadata": {"labels": {**numbers, **labels}}, "spec": {"containers": containers}}
