# SPDX-License-Identifier: Apache-2.0
"""Admission webhooks that block all pods of a namespace: one is unreachable, the other never answers."""

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
"""Seconds that the API server waits for a webhook; the operator's timeout for API requests is longer."""
LIMIT_SECONDS = 18.0
"""Time limit for operations that must not wait for a webhook; generous, but below SILENT_SECONDS."""


class Webhook:
    """A webhook server that accepts calls and does not answer them; `calls` are the times of the calls."""

    def __init__(self, plane: ControlPlane) -> None:
        self._released = threading.Event()
        self.calls: list[float] = []
        hook = self

        class Silent(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.calls.append(time.monotonic())
                hook._released.wait(60)

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
        self._released.set()
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def registered(api: Any, namespace: str, client: dict[str, str]) -> Iterator[None]:
    """During the block, let the API server call a webhook for each pod that is created in a namespace."""
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
    """Let the API server reject all pods of a namespace, because their webhook is unreachable."""
    with registered(api, namespace, {"url": "https://127.0.0.1:1/pods"}):
        yield


@contextlib.contextmanager
def hanging(api: Any, plane: ControlPlane, namespace: str) -> Iterator[Webhook]:
    """Let all pods of a namespace wait for a webhook that does not answer."""
    webhook = Webhook(plane)
    try:
        with registered(api, namespace, webhook.client):
            yield webhook
    finally:
        webhook.close()


def try_pod(api: Any, namespace: str) -> str:
    """Dry-run the creation of a pod; return the error, or an empty text."""
    container = {"name": "probe", "image": "none", "securityContext": CONTAINER_SECURITY}
    spec = {"containers": [container], "securityContext": POD_SECURITY}
    metadata = {"name": "probe", "namespace": namespace}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    try:
        api.create(pod, dryRun="All", timeout="1s")
    except Exception as error:
        return str(error)
    return ""


def rejects_pods(api: Any, namespace: str) -> bool:
    """Return whether the API server uses the failing webhook yet; registrations take effect with a delay."""
    return "failed calling webhook" in try_pod(api, namespace)


def is_called(api: Any, namespace: str, webhook: Webhook) -> bool:
    """Return whether the API server calls the hanging webhook yet; registrations take effect with a delay."""
    try_pod(api, namespace)
    return bool(webhook.calls)
