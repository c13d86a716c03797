# SPDX-License-Identifier: Apache-2.0
"""An admission webhook that does not answer blocks only the services of its namespace."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from mizzen_local.controlplane import ControlPlane
from mizzen_operator.kube import client as kube
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import KubeError
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.metrics import Metrics
from webhooks import LIMIT_SECONDS, hanging, is_called

SERVICES = 10
"""Number of services; it exceeds the number of the operator's workers."""
ENGINES = "mizzen.dev/component=engine"
NO_WEBHOOK = b'{"reason": "InternalError", "message": "failed calling webhook \\"a.b.c\\": no endpoints"}'


@pytest.mark.parametrize(
    ("data", "quick_seconds", "tries"),
    [(b'{"reason": "InternalError"}', 60.0, 4), (b"{}", 0.0, 1), (NO_WEBHOOK, 60.0, 1)],
    ids=["quick failure", "slow failure", "webhook failure"],
)
async def test_only_a_request_that_fails_quickly_is_retried_in_a_reconcile(
    monkeypatch: pytest.MonkeyPatch, data: bytes, quick_seconds: float, tries: int
) -> None:
    sent: list[str] = []

    async def send(_: KubeClient, verb: str, *__: Any) -> tuple[int, bytes]:
        sent.append(verb)
        return 500, data

    monkeypatch.setattr(kube, "RETRY_DELAYS_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(kube, "MAX_RETRIED_SECONDS", quick_seconds)
    monkeypatch.setattr(KubeClient, "_send", send)
    client = KubeClient(Configuration(), Metrics())
    with pytest.raises(KubeError):
        await client.patch(ObjectRef("Pod", "n", "p"), {})
    await client.close()
    assert sent == ["PATCH"] * tries


@pytest.mark.cluster
@pytest.mark.xdist_group("control-plane")
def test_services_of_another_namespace_get_their_pods(
    api: Any,
    node: Any,
    operators: Any,
    control_plane: ControlPlane,
    namespace: str,
    lax_namespace: str,
    minimal: Callable[..., Any],
    eventually: Any,
) -> None:
    def create(name: str, in_namespace: str) -> None:
        body = minimal(name, engine={"device": "CPU"}, gateway={"replicas": 1})
        body["metadata"]["namespace"] = in_namespace
        api.create(body)

    def pods(in_namespace: str) -> set[str]:
        listed = api.list("Pod", in_namespace, ENGINES)
        return {pod["metadata"]["uid"] for pod in listed if "deletionTimestamp" not in pod["metadata"]}

    def gets_another_pod(before: set[str]) -> None:
        began = time.monotonic()
        eventually(lambda: pods(namespace) - before, 120)
        assert time.monotonic() - began < LIMIT_SECONDS

    with hanging(api, control_plane, lax_namespace) as webhook:
        eventually(lambda: is_called(api, lax_namespace, webhook), 60, "the webhook is called")
        for number in range(SERVICES):
            create(f"held-{number}", lax_namespace)
        first = len(webhook.calls) + 8
        eventually(
            lambda: len(webhook.calls) >= first,
            150,
            "the namespace has as many hanging reconciles as allowed",
        )
        create("free", namespace)
        gets_another_pod(set())
        eventually(lambda: len(webhook.calls) >= first + SERVICES, 150, "reconciles hang again")
        before = pods(namespace)
        api.delete("Pod", namespace, api.list("Pod", namespace, ENGINES)[0]["metadata"]["name"])
        gets_another_pod(before)
        assert not pods(lax_namespace)
    eventually(
        lambda: len(pods(lax_namespace)) == SERVICES, 60, "without the webhook, all services get their pods"
    )
    for of_test in (namespace, lax_namespace):
        for body in api.list("InferenceService", of_test):
            api.delete("InferenceService", of_test, body["metadata"]["name"])
