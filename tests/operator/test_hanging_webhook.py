"""An admission webhook that does not answer stops the services that it has to agree to, and no others."""

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
from webhooks import BOUND_SECONDS, hanging, is_asked

SERVICES = 10
"""More than the operator's workers."""
ENGINES = "mizzen.dev/component=engine"
NO_WEBHOOK = b'{"reason": "InternalError", "message": "failed calling webhook \\"a.b.c\\": no endpoints"}'


@pytest.mark.parametrize(
    ("data", "quick_seconds", "tries"),
    [(b'{"reason": "InternalError"}', 60.0, 4), (b"{}", 0.0, 1), (NO_WEBHOOK, 60.0, 1)],
    ids=["quick", "slow", "webhook"],
)
async def test_only_what_fails_quickly_is_sent_again_in_a_look(
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
def test_another_namespaces_services_get_their_pods(
    api: Any,
    node: Any,
    operators: Any,
    control_plane: ControlPlane,
    namespace: str,
    lax_namespace: str,
    minimal: Callable[..., Any],
    eventually: Any,
) -> None:
    def create(name: str, where: str) -> None:
        body = minimal(name, engine={"device": "CPU"}, gateway={"replicas": 1})
        body["metadata"]["namespace"] = where
        api.create(body)

    def pods(where: str) -> set[str]:
        found = api.list("Pod", where, ENGINES)
        return {pod["metadata"]["uid"] for pod in found if "deletionTimestamp" not in pod["metadata"]}

    def gets_another_pod(before: set[str]) -> None:
        began = time.monotonic()
        eventually(lambda: pods(namespace) - before, 120)
        assert time.monotonic() - began < BOUND_SECONDS

    with hanging(api, control_plane, lax_namespace) as webhook:
        eventually(lambda: is_asked(api, lax_namespace, webhook), 60, "it is asked")
        for number in range(SERVICES):
            create(f"held-{number}", lax_namespace)
        first = len(webhook.asked) + 8
        eventually(lambda: len(webhook.asked) >= first, 150, "as many looks hang as one namespace has turns")
        create("free", namespace)
        gets_another_pod(set())
        eventually(lambda: len(webhook.asked) >= first + SERVICES, 150, "they hang again")
        before = pods(namespace)
        api.delete("Pod", namespace, api.list("Pod", namespace, ENGINES)[0]["metadata"]["name"])
        gets_another_pod(before)
        assert not pods(lax_namespace)
    eventually(lambda: len(pods(lax_namespace)) == SERVICES, 60, "all have their pods when it is gone")
    for where in (namespace, lax_namespace):
        for one in api.list("InferenceService", where):
            api.delete("InferenceService", where, one["metadata"]["name"])
