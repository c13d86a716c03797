# SPDX-License-Identifier: Apache-2.0
"""The status of a service that is being deleted, and of one whose gateway is rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from live_service import Service
from marks import CONTROL_PLANE

pytestmark = CONTROL_PLANE


def test_the_status_of_a_service_with_a_finalizer_reports_what_is_left(
    live_service: Callable[..., Service], api: Any, namespace: str
) -> None:
    demo = live_service()
    demo.settle(1)
    api.patch("InferenceService", namespace, "demo", {"metadata": {"finalizers": ["example.com/hold"]}})
    try:
        api.delete("InferenceService", namespace, "demo")
        demo.eventually(lambda: demo.condition("Ready")["reason"] == "Deleting")
        assert demo.condition("Available")["status"] == "True"
        assert demo.condition("Failed")["status"] == "False"
        assert demo.status()["observedGeneration"] == demo.body()["metadata"]["generation"]
        api.delete("Pod", namespace, demo.live()[0])
        demo.eventually(lambda: demo.condition("Available")["status"] == "False")
        assert not demo.live(), "nothing is made any more"
    finally:
        api.patch("InferenceService", namespace, "demo", {"metadata": {"finalizers": None}})
    demo.eventually(lambda: api.find("InferenceService", namespace, "demo") is None)


def test_a_gateway_whose_pods_are_rejected_reports_why(
    live_service: Callable[..., Service], api: Any, namespace: str
) -> None:
    path = f"/api/v1/namespaces/{namespace}/limitranges"
    metadata = {"name": "small", "namespace": namespace}
    spec = {"limits": [{"type": "Container", "max": {"memory": "1Mi"}}]}
    api.request("POST", path, {"apiVersion": "v1", "kind": "LimitRange", "metadata": metadata, "spec": spec})
    demo = live_service(replicas=0)
    demo.eventually(lambda: demo.condition("GatewayReady")["reason"] == "GatewayRejected")
    assert "memory" in demo.condition("GatewayReady")["message"]
    assert demo.condition("Ready")["reason"] == "GatewayRejected"
    api.request("DELETE", f"{path}/small")
    demo.eventually(lambda: demo.condition("GatewayReady")["status"] == "True", 120)
