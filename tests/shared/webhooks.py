"""Admission webhooks that agree to no pod of a namespace: nobody serves one, and the other stays silent."""

from __future__ import annotations

import base64
import contextlib
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mizzen_local.controlplane import ControlPlane
from mizzen_operator.resources.metadata import CONTAINER_SECURITY, POD_SECURITY

WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
SILENT_SECONDS = 25
"""How long the API server waits for one; less than the operator waits for the API server."""
BOUND_SECONDS = 18.0
"""Loose, for a machine that does much besides: it is less than a webhook's silence takes."""


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
        self.client = {
            "url": f"https://{plane.addresses.host}:{self._server.server_address[1]}/",
            "caBundle": base64.b64encode(plane.authority.read_bytes()).decode(),
        }

    def close(self) -> None:
        self._let_go.set()
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def asked_of_pods(api: Any, namespace: str, client: dict[str, str]) -> Iterator[None]:
    """Have the API server ask a webhook of every pod of a namespace."""
    name = f"pods.{namespace}.example"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    webhook = {
        "name": name,
        "clientConfig": client,
        "rules": [rule],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "failurePolicy": "Fail",
        "timeoutSeconds": SILENT_SECONDS,
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration"}
    api.request("POST", WEBHOOKS, {**kind, "metadata": {"name": name}, "webhooks": [webhook]})
    try:
        yield
    finally:
        api.request("DELETE", f"{WEBHOOKS}/{name}")


@contextlib.contextmanager
def failing(api: Any, namespace: str) -> Iterator[None]:
    """A namespace whose pods are refused, for nobody answers at the webhook's address."""
    with asked_of_pods(api, namespace, {"url": "https://127.0.0.1:1/pods"}):
        yield


@contextlib.contextmanager
def hanging(api: Any, plane: ControlPlane, namespace: str) -> Iterator[Webhook]:
    """A namespace whose pods wait for a webhook."""
    webhook = Webhook(plane)
    try:
        with asked_of_pods(api, namespace, webhook.client):
            yield webhook
    finally:
        webhook.close()


def _try(api: Any, namespace: str) -> str:
    """Make a pod that is not stored; returns why it was refused."""
    container = {"name": "probe", "image": "none", "securityContext": CONTAINER_SECURITY}
    spec = {"containers": [container], "securityContext": POD_SECURITY}
    metadata = {"name": "probe", "namespace": namespace}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    try:
        api.create(pod, dryRun="All", timeout="1s")
    except Exception as error:
        return str(error)
    return ""


def is_refused(api: Any, namespace: str) -> bool:
    """Whether the API server knows a webhook that fails by now, which takes it a moment."""
    return "failed calling webhook" in _try(api, namespace)


def is_asked(api: Any, namespace: str, webhook: Webhook) -> bool:
    """Whether the API server knows one that stays silent by now, which takes it a moment."""
    _try(api, namespace)
    return bool(webhook.asked)
