"""A hub, a bucket and a registry in a pod, each with the demo model and a large file beside it.

    python sources_pod.py HOST

HOST is the name by which other pods reach this one. It needs Python, the demo model, `model_servers.py` and
`oci_registry.py`. Files are held back in their middle until `GET /open` of the control port. `GET /counts`
tells how many requests there were, and of the large file, by server, the first byte of each and how many
bytes were sent.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from model_servers import Address, Bucket, Handler, Hub, Server
from oci_registry import Registry

MODEL = Path("/opt/mizzen/models/demo")
HUB, CDN, BUCKET, REGISTRY, CONTROL = range(9000, 9005)
LARGE, LARGE_BYTES = "large.txt", 32 * 1024 * 1024 + 17
TOKEN = "hub-token"
PREFIX, REPOSITORY, TAG = "llm/tiny", "org/tiny", "v1"


class Sources:
    """All servers of the pod."""

    def __init__(self, host: str) -> None:
        """Serve the model everywhere, behind one gate."""
        files = {path.name: path.read_bytes() for path in MODEL.iterdir() if path.is_file()}
        files[LARGE] = random.Random(0).randbytes(LARGE_BYTES)

        def at(port: int) -> Address:
            return Address("0.0.0.0", host, port)

        hub, bucket, registry = Hub(at(HUB), at(CDN)), Bucket(at(BUCKET)), Registry(at(REGISTRY))
        hub.token = TOKEN
        commit = hub.push(files, large={"model.safetensors", LARGE})
        bucket.objects |= {f"{PREFIX}/{name}": data for name, data in files.items()}
        layers = registry.artifact(files)
        registry.push(TAG, layers)
        [digest] = [layer["digest"] for layer in layers if layer["size"] == LARGE_BYTES]
        self._large = {
            "hub": (hub.cdn, f"/{commit}/{LARGE}"),
            "bucket": (bucket.server, f"/{bucket.NAME}/{PREFIX}/{LARGE}"),
            "registry": (registry.server, f"/v2/{REPOSITORY}/blobs/{digest}"),
        }
        self._all = (hub.api, hub.cdn, bucket.server, registry.server)
        self._gate = threading.Event()
        for server in self._all:
            server.faults.gate = self._gate
        Server(self._control, at(CONTROL))

    def _control(self, handler: Handler) -> None:
        if handler.path == "/open":
            self._gate.set()
        known = {
            "requests": sum(len(server.requests) for server in self._all),
            "large": {name: _counted(server, path) for name, (server, path) in self._large.items()},
        }
        handler.reply(200, json.dumps(known).encode(), {"Content-Type": "application/json"})


def _counted(server: Server, path: str) -> dict[str, Any]:
    """The first byte of each request for a file, and how many bytes of it were sent."""
    requests = [
        (method, asked.partition("?")[0], headers) for method, asked, headers in list(server.requests)
    ]
    asked = [headers for method, at, headers in requests if (method, at) == ("GET", path)]
    ranges = [next((value for name, value in one.items() if name.lower() == "range"), "") for one in asked]
    with server.counting:
        sent = server.served[path]
    starts = [int(one.removeprefix("bytes=").partition("-")[0] or 0) for one in ranges]
    return {"starts": starts, "sent": sent}


if __name__ == "__main__":
    Sources(sys.argv[1])
    signal.pause()
