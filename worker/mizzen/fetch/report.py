# SPDX-License-Identifier: Apache-2.0
"""Report a fetch: as `GET /progress` while it runs, and as a termination message when it ends."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mizzen.common import addresses
from mizzen.fetch.progress import FetchProgress

logger = logging.getLogger(__name__)
MAX_MESSAGE = 4096
"""Maximum size of a termination message in Kubernetes, in bytes."""


@contextmanager
def serve_progress(progress: FetchProgress, host: str, port: int) -> Iterator[int]:
    """Serve `/progress` and `/healthz` while the context is active, and yield the bound port.

    If `port` is -1, nothing is served and -1 is yielded.

    Raises:
        OSError: the address cannot be bound.
    """
    if port < 0:
        yield -1
        return

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            bodies: dict[str, Any] = {"/progress": progress.snapshot(), "/healthz": "ok"}
            body = bodies.get(self.path.partition("?")[0])
            data = json.dumps(body).encode()
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        address_family = addresses.address_family(host)

    server = Server((host, port), Handler)
    thread = threading.Thread(target=server.serve_forever, name="progress", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def write_termination_message(path: str, text: str) -> None:
    """Write a termination message for Kubernetes to `path`; do nothing if the folder of `path` is missing."""
    try:
        if Path(path).parent.is_dir():
            Path(path).write_bytes(text.encode()[:MAX_MESSAGE])
    except OSError as error:
        logger.warning("cannot write the termination message: %s", error)
