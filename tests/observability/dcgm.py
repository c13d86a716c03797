# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the DCGM exporter, because the tests' machines have no GPU.

It answers with the exporter's names and labels, one GPU for each engine pod. The pod's labels have the prefix
`exported_`, which Prometheus adds if it does not honor the labels of a target.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

VALUES = {
    "DCGM_FI_DEV_GPU_UTIL": 73,
    "DCGM_FI_DEV_FB_USED": 65536,
    "DCGM_FI_DEV_POWER_USAGE": 412.5,
    "DCGM_FI_DEV_GPU_TEMP": 61,
    "DCGM_FI_DEV_XID_ERRORS": 0,
}


class DcgmStandIn:
    """An HTTP server with the exporter's metrics; `pods` returns (namespace, name) of the engine pods."""

    def __init__(self, pods: Callable[[], Iterable[tuple[str, str]]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = exposition(pods()).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def exposition(pods: Iterable[tuple[str, str]]) -> str:
    """Return the metrics of one GPU for each pod, in Prometheus' text format."""
    pods = list(pods)
    lines = []
    for metric, value in VALUES.items():
        lines.append(f"# TYPE {metric} gauge")
        for number, (namespace, name) in enumerate(pods):
            labels = f'gpu="{number}",exported_namespace="{namespace}",exported_pod="{name}"'
            lines.append(f"{metric}{{{labels}}} {value}")
    return "\n".join(lines) + "\n"
