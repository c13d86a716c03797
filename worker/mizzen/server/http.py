# SPDX-License-Identifier: Apache-2.0
"""HTTP server of the supervisor: `/healthz`, `/readyz`, `/metrics` and `POST /drain`."""

from __future__ import annotations

import ipaddress
import json
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from mizzen.common.addresses import address_family

log = logging.getLogger(__name__)

REQUEST_SECONDS = 5.0
TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of `/metrics`. OpenMetrics is never sent, even to clients that prefer it: in that format
prometheus_client replaces the colon in names such as `vllm:...` by `_`."""


@dataclass(frozen=True, slots=True)
class Health:
    """Result of a health probe: whether it succeeded, and the JSON body of the response."""

    ok: bool
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Routes:
    """Functions of the supervisor that answer requests; they are called from the server's threads."""

    get_liveness: Callable[[], Health]
    get_readiness: Callable[[], Health]
    drain: Callable[[], dict[str, Any]]
    metrics: CollectorRegistry


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = REQUEST_SECONDS

    @property
    def _routes(self) -> Routes:
        assert isinstance(self.server, HttpServer)
        return self.server.routes

    def do_GET(self) -> None:
        routes, path = self._routes, self.path.partition("?")[0]
        if path in ("/healthz", "/readyz"):
            health = routes.get_liveness() if path == "/healthz" else routes.get_readiness()
            self._json(HTTPStatus.OK if health.ok else HTTPStatus.SERVICE_UNAVAILABLE, health.body)
        elif path == "/metrics":
            self._reply(HTTPStatus.OK, TEXT, generate_latest(routes.metrics))
        else:
            self._json(
                HTTPStatus.NOT_FOUND, {"error": f"no {path}; the paths are /healthz, /readyz, /metrics"}
            )

    def do_POST(self) -> None:
        self.close_connection = True  # a request body would be left unread
        if self.path == "/drain" and not self._is_local_client():
            text = "a drain cannot be undone; it can be requested only from inside the engine's pod"
            self._json(HTTPStatus.FORBIDDEN, {"error": text})
        elif self.path == "/drain":
            self._json(HTTPStatus.ACCEPTED, self._routes.drain())
        else:
            self._json(HTTPStatus.NOT_FOUND, {"error": f"no {self.path}; the only path for POST is /drain"})

    def _is_local_client(self) -> bool:
        return is_local_client(str(self.client_address[0]), str(self.connection.getsockname()[0]))

    def _json(self, status: HTTPStatus, body: dict[str, Any]) -> None:
        self._reply(status, "application/json", json.dumps(body).encode() + b"\n")

    def _reply(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests: probes arrive every second."""


def is_local_client(client: str, server: str) -> bool:
    """Return whether a connection comes from this pod: from loopback, or from the pod's own address.

    Args:
        client: IP address of the client.
        server: IP address at which the server accepted the connection.
    """
    return client == server or ipaddress.ip_address(client).is_loopback


class HttpServer(ThreadingHTTPServer):
    """HTTP server that answers requests from daemon threads until `stop` is called."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, routes: Routes) -> None:
        """Bind the address and start serving.

        Raises:
            OSError: the address cannot be bound.
        """
        self.routes = routes
        self.address_family = address_family(host)
        super().__init__((host, port), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self._thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log, at debug level, an error that occurred while a client was answered."""
        log.debug("cannot answer an HTTP client", exc_info=True)

    def server_bind(self) -> None:
        """Bind the socket without resolving this host's name, which may be slow.

        SO_REUSEADDR lets a restarted container bind while its predecessor's connections are in TIME_WAIT.
        """
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def stop(self) -> None:
        """Stop serving and close the socket."""
        self.shutdown()
        self.server_close()
