# SPDX-License-Identifier: Apache-2.0
"""The supervisor's HTTP server: its port, and which clients may start a drain."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from unittest import mock

import pytest
from prometheus_client import CollectorRegistry

from mizzen.server import http
from mizzen.server.http import Health, HttpServer, Routes


def serve(port: int) -> HttpServer:
    ok = Health(ok=True, body={})
    routes = Routes(
        get_liveness=lambda: ok, get_readiness=lambda: ok, drain=dict, metrics=CollectorRegistry()
    )
    return HttpServer("127.0.0.1", port, routes)


def test_a_restarted_engine_binds_the_port_that_its_predecessor_served() -> None:
    first = serve(0)
    port = first.server_port
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        # The server closes first, so that its end of the connection stays in TIME_WAIT.
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        while client.recv(65536):
            pass
    first.stop()
    second = serve(port)
    assert second.server_port == port
    second.stop()


@pytest.mark.parametrize(
    ("client", "server", "is_local"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.97.4.7", "127.97.4.9", True),
        ("10.1.2.3", "10.1.2.3", True),
        ("fd00::1", "fd00::1", True),
        ("10.1.2.4", "10.1.2.3", False),
        ("fd00::2", "fd00::1", False),
    ],
)
def test_only_connections_from_the_same_pod_are_local(client: str, server: str, is_local: bool) -> None:
    assert http.is_local_client(client, server) is is_local


def test_a_drain_from_outside_the_pod_is_rejected() -> None:
    """A drain cannot be undone, and it is the only request on this port that changes anything."""
    server = serve(0)
    url = f"http://127.0.0.1:{server.server_port}/drain"
    with (
        mock.patch.object(http, "is_local_client", return_value=False),
        pytest.raises(urllib.error.HTTPError) as refused,
    ):
        urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60)
    assert refused.value.code == 403
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60) as answer:
        assert answer.status == 202
    server.stop()
