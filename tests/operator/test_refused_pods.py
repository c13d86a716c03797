"""What goes on while the API server takes no pod: for a quota, or for a webhook that fails."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from live_service import ENGINES, Service
from marks import CONTROL_PLANE

pytestmark = CONTROL_PLANE

HANGS_SECONDS = 10
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


def limit_pods(api: Any, namespace: str, pods: int) -> None:
    metadata = {"name": "few", "namespace": namespace}
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    spec = {"hard": {"pods": str(pods)}}
    api.request(
        "POST", path, {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": spec}
    )


def quota(api: Any, namespace: str) -> dict[str, Any]:
    return api.request("GET", f"/api/v1/namespaces/{namespace}/resourcequotas/few").get("status", {})


@contextmanager
def failing_webhook(api: Any, namespace: str, port: int = 1) -> Iterator[None]:
    """No pod is made in a namespace, for nobody at a port of this machine answers whether it may be."""
    name = f"fails.{namespace}.example"
    webhook = {
        "name": name,
        "clientConfig": {"url": f"https://127.0.0.1:{port}/pods"},
        "rules": [
            {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
        ],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "failurePolicy": "Fail",
        "timeoutSeconds": HANGS_SECONDS,
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration"}
    api.request("POST", WEBHOOKS, {**kind, "metadata": {"name": name}, "webhooks": [webhook]})
    try:
        yield
    finally:
        api.request("DELETE", f"{WEBHOOKS}/{name}")


def test_a_rollout_goes_on_where_a_quota_lets_no_group_be_added(
    live_service: Callable[..., Service], api: Any, namespace: str
) -> None:
    limit_pods(api, namespace, 3)
    demo = live_service(replicas=2, rollout={"maxSurge": 1, "maxUnavailable": 1})
    demo.settle(2)
    demo.eventually(lambda: quota(api, namespace).get("used") == {"pods": "3"})
    before = demo.live()
    demo.patch(engine={"pageSize": 32})
    demo.eventually(lambda: not set(before) & set(demo.live()), what="other groups")
    demo.settle(2)
    assert demo.condition("Failed")["status"] == "False"


def test_no_engine_runs_without_the_policies_that_the_spec_asks_for(
    live_service: Callable[..., Service], api: Any, namespace: str
) -> None:
    limit_pods(api, namespace, 2)
    demo = live_service(replicas=3, networkPolicy="Enabled")
    demo.eventually(lambda: demo.condition("Failed")["reason"] == "PodRejected")
    for kind in ("NetworkPolicy", "PodDisruptionBudget"):
        demo.eventually(lambda kind=kind: api.find(kind, namespace, "demo-engine"), what=kind)
    assert "quota" in demo.condition("Failed")["message"]


def test_a_status_stays_true_while_a_webhook_fails(
    live_service: Callable[..., Service], api: Any, namespace: str
) -> None:
    demo = live_service()
    demo.settle(1)
    with failing_webhook(api, namespace):
        api.delete("Pod", namespace, demo.live()[0], gracePeriodSeconds=0)
        demo.eventually(lambda: demo.condition("Available")["status"] == "False", 10)
        assert demo.condition("Ready")["status"] == "False"
        demo.eventually(lambda: demo.condition("Failed")["reason"] == "WebhookFailed", 10)
        assert namespace in demo.condition("Failed")["message"], "it names the webhook"
        demo.patch(replicas=2)
        generation = demo.body()["metadata"]["generation"]
        demo.eventually(lambda: demo.status()["observedGeneration"] == generation, 20)
        assert not api.list("Pod", namespace, ENGINES)
    demo.settle(2)
    assert demo.condition("Failed")["status"] == "False"


def test_a_status_stays_true_while_a_webhook_hangs(
    live_service: Callable[..., Service], api: Any, namespace: str
) -> None:
    demo = live_service()
    demo.settle(1)
    with socket.create_server(("127.0.0.1", 0)) as mute, failing_webhook(api, namespace, port_of(mute)):
        api.delete("Pod", namespace, demo.live()[0], gracePeriodSeconds=0)
        demo.eventually(lambda: demo.condition("Available")["status"] == "False", HANGS_SECONDS / 2)
        assert demo.condition("Ready")["status"] == "False"
        demo.eventually(lambda: demo.condition("Failed")["reason"] == "WebhookFailed")
    demo.settle(1)


def port_of(server: socket.socket) -> int:
    return server.getsockname()[1]
