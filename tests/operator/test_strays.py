"""Pods of a service whose labels somebody changes: one may be taken out of service, and none is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from live_service import Service
from marks import CONTROL_PLANE
from mizzen_operator.pods.observe import _has_valid_labels

pytestmark = CONTROL_PLANE


class Harbour:
    """One service of two groups, in a namespace of its own."""

    def __init__(self, api: Any, namespace: str, eventually: Callable[..., Any]) -> None:
        self.api, self.namespace, self.eventually = api, namespace, eventually

    def pods(self) -> dict[str, Any]:
        """Metadata of the engines' pods that nobody has deleted, by name."""
        found = [pod["metadata"] for pod in self.api.list("Pod", self.namespace)]
        return {
            one["name"]: one
            for one in found
            if "deletionTimestamp" not in one and "gateway" not in one["name"]
        }

    def settled(self) -> bool:
        """Whether two groups serve, and the status says so of the spec as it is."""
        status = self.api.get("InferenceService", self.namespace, "demo").get("status", {})
        ready = [c for c in status.get("conditions", []) if c["type"] == "Ready" and c["status"] == "True"]
        return bool(ready) and status["availableReplicas"] == status["replicas"] == 2

    def label(self, name: str, label: str, value: str | None) -> None:
        self.api.patch("Pod", self.namespace, name, {"metadata": {"labels": {label: value}}})

    def without(self, label: str) -> str:
        """Take a label from a pod, which is left while another takes its place; returns its name."""
        before = set(self.pods())
        out = min(before)
        self.label(out, label, None)
        self.eventually(lambda: len(set(self.pods()) - before) == 1, 30, "its place is taken")
        self.eventually(self.settled, 60, "two groups serve")
        assert out in self.pods()
        return out


@pytest.fixture
def harbour(live_service: Callable[..., Service]) -> Harbour:
    demo = live_service(replicas=2)
    made = Harbour(demo.api, demo.namespace, demo.eventually)
    made.eventually(made.settled, 90, "it serves")
    return made


def test_a_pod_without_its_services_label_is_left_and_another_takes_its_place(harbour: Harbour) -> None:
    out = harbour.without("mizzen.dev/service")
    assert len(harbour.pods()) == 3
    harbour.api.delete("Pod", harbour.namespace, out, gracePeriodSeconds=0)
    harbour.eventually(lambda: out not in harbour.pods(), 10)
    harbour.eventually(harbour.settled, 60, "two groups serve still")


def test_a_pod_that_is_no_engine_by_its_label_is_left_until_it_is_one_again(harbour: Harbour) -> None:
    out = harbour.without("mizzen.dev/component")
    harbour.label(out, "mizzen.dev/component", "engine")
    harbour.eventually(lambda: harbour.settled() and len(harbour.pods()) == 2, 60, "one is too many")


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
def test_a_pod_of_which_nothing_tells_what_it_is_is_replaced(
    harbour: Harbour, label: str, value: str | None
) -> None:
    """Gateways would route to it for ever, whatever the spec becomes."""
    before = set(harbour.pods())
    harbour.label(min(before), label, value)
    harbour.eventually(lambda: min(before) not in harbour.pods(), 30, "it goes")
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
def test_a_pod_of_several_that_tells_no_more_which_it_is_is_replaced(
    live_service: Callable[..., Service], label: str, value: str | None
) -> None:
    demo = live_service(parallelism={"tensor": 2}, accelerator={"perPod": 1})
    demo.eventually(lambda: demo.condition("Ready")["status"] == "True", 90, "it serves")
    [second] = [pod for pod in demo.pods() if pod["metadata"]["labels"]["mizzen.dev/rank"] == "1"]
    patch = {"metadata": {"labels": {label: value}}}
    demo.api.patch("Pod", demo.namespace, second["metadata"]["name"], patch)

    def whole() -> bool:
        pods = demo.pods()
        ranks = sorted(pod["metadata"]["labels"].get("mizzen.dev/rank", "") for pod in pods)
        gone = second["metadata"]["uid"] not in {pod["metadata"]["uid"] for pod in pods}
        return gone and ranks == ["0", "1"] and demo.condition("Ready")["status"] == "True"

    demo.eventually(whole, 90, "a whole group serves")


def test_what_admission_has_put_in_place_of_our_arguments_is_no_stray() -> None:
    """A wrapper around the engine: then the labels alone tell."""
    gang = {"mizzen.dev/rank": "1", "mizzen.dev/pods": "2"}
    wrapped = pod(gang, ["sh", "-c", "mizzen engine --nodes 2"])
    assert _has_valid_labels(wrapped)
    assert _has_valid_labels(pod(gang, ["engine", "--nodes", "2", "--node-rank", "1"]))
    assert not _has_valid_labels(pod(gang, ["engine", "--nodes", "2", "--node-rank", "0"]))
    assert not _has_valid_labels(pod({**gang, "mizzen.dev/pods": "99999"}, ["sh"]))
    assert _has_valid_labels(pod({}, ["engine", "--model", "x"])), "of a release that gave one pod no rank"


def pod(labels: dict[str, str], arguments: list[str]) -> dict[str, Any]:
    numbers = {"mizzen.dev/group": "0", "mizzen.dev/incarnation": "0", "mizzen.dev/revision": "a"}
    containers = [
        {"name": "helper", "args": ["engine", "--nodes", "7"]},
        {"name": "engine", "args": arguments},
    ]
    return {"metadata": {"labels": {**numbers, **labels}}, "spec": {"containers": containers}}
