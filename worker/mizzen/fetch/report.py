"""Reports of a fetch: `GET /progress` while it runs, and the termination message at its end."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mizzen.fetch.progress import FetchProgress

logger = logging.getLogger(__name__)
MAX_MESSAGE = 4096
"""Maximum length of a termination message in Kubernetes, in bytes."""


@contextmanager
def serve_progress(progress: FetchProgress, host: str, port: int) -> Iterator[int]:
    """Serve `/progress` and `/healthz` within the block; yields the port, or -1 without a server.

    Raises:
        OSError: the address cannot be bound.
    """
    if port < 0:
        yield -1
        return

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            found: dict[str, Any] = {"/progress": progress.snapshot(), "/healthz": "ok"}
            body = found.get(self.path.partition("?")[0])
            data = json.dumps(body).encode()
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((host, port), Handler)
    thread = threading.Thread(target=server.serve_forever, name="progress", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def write_termination_message(path: str, text: str) -> None:
    """Write the termination message for Kubernetes, if the folder of `path` exists."""
    try:
        if Path(path).parent.is_dir():
            Path(path).write_bytes(text.encode()[:MAX_MESSAGE])
    except OSError as error:
        logger.warning("cannot write the termination message: %s", error)
