"""An admission webhook that does not answer stops the services that it has to agree to, and no others."""

from __future__ import annotations

import base64
import contextlib
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from mizzen_local.controlplane import ControlPlane
from mizzen_operator import kube
from mizzen_operator.kube import Kube, KubeError, Ref
from mizzen_operator.metrics import Metrics

SERVICES = 10
"""More than the operator's workers."""
TIMEOUT_SECONDS = 10
BOUND_SECONDS = 5.0
"""Loose, for a machine that does much besides: it is less than a webhook's silence takes."""
CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
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

    async def send(_: Kube, verb: str, *__: Any) -> tuple[int, bytes]:
        sent.append(verb)
        return 500, data

    monkeypatch.setattr(kube, "PAUSES_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(kube, "QUICK_SECONDS", quick_seconds)
    monkeypatch.setattr(Kube, "_send", send)
    client = Kube(Configuration(), Metrics())
    with pytest.raises(KubeError):
        await client.patch(Ref("Pod", "n", "p"), {})
    await client.close()
    assert sent == ["PATCH"] * tries


class Webhook:
    """A server that takes requests, and answers none until it is let go."""

    def __init__(self, plane: ControlPlane) -> None:
        self._let_go = threading.Event()
        self.asked: list[float] = []
        hook = self

        class Silent(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.asked.append(time.monotonic())
                hook._let_go.wait(60)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((plane.addresses.host, 0), Silent)
        self._server.daemon_threads = True
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(plane.folder / "pki/apiserver.crt", plane.folder / "pki/apiserver.key")
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._url = f"https://{plane.addresses.host}:{self._server.server_address[1]}/"
        self._authority = base64.b64encode(plane.authority.read_bytes()).decode()

    def configuration(self, namespace: str) -> dict[str, Any]:
        """Ask it of every pod of a namespace."""
        rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
        webhook = {
            "name": "silent.example.com",
            "clientConfig": {"url": self._url, "caBundle": self._authority},
            "rules": [rule],
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "failurePolicy": "Fail",
            "timeoutSeconds": TIMEOUT_SECONDS,
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
        }
        return {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": namespace},
            "webhooks": [webhook],
        }

    def close(self) -> None:
        self._let_go.set()
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def hanging(api: Any, plane: ControlPlane, namespace: str) -> Iterator[Webhook]:
    """A namespace whose pods wait for a webhook."""
    webhook = Webhook(plane)
    api.request("POST", CONFIGURATIONS, webhook.configuration(namespace))
    try:
        yield webhook
    finally:
        api.request("DELETE", f"{CONFIGURATIONS}/{namespace}")
        webhook.close()


def is_asked(api: Any, namespace: str, webhook: Webhook) -> bool:
    """Whether the API server knows it by now, which takes it a moment."""
    container = {"name": "probe", "image": "none"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe", "namespace": namespace}}
    with contextlib.suppress(Exception):
        api.create({**pod, "spec": {"containers": [container]}}, dryRun="All", timeout="1s")
    return bool(webhook.asked)


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
        eventually(lambda: len(webhook.asked) >= first, 60, "as many looks hang as one namespace has turns")
        create("free", namespace)
        gets_another_pod(set())
        eventually(lambda: len(webhook.asked) >= first + SERVICES, 60, "they hang again")
        before = pods(namespace)
        api.delete("Pod", namespace, api.list("Pod", namespace, ENGINES)[0]["metadata"]["name"])
        gets_another_pod(before)
        assert not pods(lax_namespace)
    eventually(lambda: len(pods(lax_namespace)) == SERVICES, 60, "all have their pods when it is gone")
    for where in (namespace, lax_namespace):
        for one in api.list("InferenceService", where):
            api.delete("InferenceService", where, one["metadata"]["name"])
