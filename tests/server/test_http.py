"""The supervisor's HTTP server itself."""

from __future__ import annotations

import socket

from prometheus_client import CollectorRegistry

from mizzen.server.http import Health, HttpServer, Routes


def serve(port: int) -> HttpServer:
    good = Health(good=True, body={})
    routes = Routes(healthy=lambda: good, ready=lambda: good, drain=dict, metrics=CollectorRegistry())
    return HttpServer("127.0.0.1", port, routes)


def test_a_restarted_engine_binds_the_port_that_its_predecessor_served() -> None:
    first = serve(0)
    port = first.server_port
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        # The server closes first, so that its end of the connection stays in TIME_WAIT.
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        while client.recv(65536):
            pass
    first.stop()
    second = serve(port)
    assert second.server_port == port
    second.stop()
