"""Pods of a service whose labels somebody changes: one may be taken out of service, and none is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from live_service import Service
from marks import CONTROL_PLANE

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

    def unlabel(self, name: str, label: str) -> None:
        self.label(name, label, None)

    def label(self, name: str, label: str, value: str | None) -> None:
        self.api.patch("Pod", self.namespace, name, {"metadata": {"labels": {label: value}}})


@pytest.fixture
def harbour(live_service: Callable[..., Service]) -> Harbour:
    demo = live_service(replicas=2)
    made = Harbour(demo.api, demo.namespace, demo.eventually)
    made.eventually(made.settled, 90, "it serves")
    return made


def test_a_pod_without_its_services_label_is_left_and_another_takes_its_place(harbour: Harbour) -> None:
    before = set(harbour.pods())
    out = min(before)
    harbour.unlabel(out, "mizzen.dev/service")
    harbour.eventually(lambda: len(set(harbour.pods()) - before) == 1, 30, "its place is taken")
    harbour.eventually(harbour.settled, 60, "two groups serve")
    assert out in harbour.pods()
    assert len(harbour.pods()) == 3
    harbour.api.delete("Pod", harbour.namespace, out, gracePeriodSeconds=0)
    harbour.eventually(lambda: out not in harbour.pods(), 10)
    harbour.eventually(harbour.settled, 60, "two groups serve still")


def test_a_pod_that_is_no_engine_by_its_label_is_left_until_it_is_one_again(harbour: Harbour) -> None:
    before = set(harbour.pods())
    out = min(before)
    harbour.unlabel(out, "mizzen.dev/component")
    harbour.eventually(lambda: len(set(harbour.pods()) - before) == 1, 30, "its place is taken")
    harbour.eventually(harbour.settled, 60, "two groups serve")
    assert out in harbour.pods()
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
