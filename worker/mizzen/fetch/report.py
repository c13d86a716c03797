"""Shows a fetch to others: `GET /progress` while it runs, the termination message when it ends."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mizzen.fetch.progress import Progress

logger = logging.getLogger(__name__)
MAX_MESSAGE = 4096
"""What Kubernetes keeps of a termination message, in bytes."""


@contextmanager
def served(progress: Progress, host: str, port: int) -> Iterator[int]:
    """Answer `/progress` and `/healthz` while the block runs; gives the port, -1 when there is none.

    Raises:
        OSError: the address cannot be had.
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


def terminate(path: str, text: str) -> None:
    """Leave a last word where Kubernetes looks for it, if such a place is there."""
    try:
        if Path(path).parent.is_dir():
            Path(path).write_bytes(text.encode()[:MAX_MESSAGE])
    except OSError as error:
        logger.warning("the termination message was not written: %s", error)
