# SPDX-License-Identifier: Apache-2.0
"""Serve the demo model with an additional large file from a hub, a bucket and a registry in one pod.

The hub serves a mixture of experts and a model that reads images, too, on further branches.

    python sources_pod.py HOST

HOST is the DNS name of this pod. The script needs Python, the demo model, `model_servers.py`,
`oci_registry.py`, and in its folder the files of the other models, whose names begin with the names of
their branches, as `file_prefix` returns them. The servers withhold the second half of each file until `GET
/open` on the control port. `GET /counts` returns the number of all requests and, for the large file on each
server, the offset at which each request starts and the number of bytes sent.
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
MIXTURE, VISION = "mixture", "vision"
"""Branches of a mixture of experts and of a model that reads images."""


def file_prefix(branch: str) -> str:
    """Return with what the names of a branch's files begin in the script's folder."""
    return f"{branch}-"


class Sources:
    """All servers of the pod, and their control port."""

    def __init__(self, host: str) -> None:
        """Start all servers; until one common gate opens, they withhold the second half of each file."""
        files = {path.name: path.read_bytes() for path in MODEL.iterdir() if path.is_file()}
        files[LARGE] = random.Random(0).randbytes(LARGE_BYTES)

        def at(port: int) -> Address:
            return Address("0.0.0.0", host, port)

        hub, bucket, registry = Hub(at(HUB), at(CDN)), Bucket(at(BUCKET)), Registry(at(REGISTRY))
        hub.token = TOKEN
        commit = hub.push(files, large={"model.safetensors", LARGE})
        for branch in (MIXTURE, VISION):
            prefix = file_prefix(branch)
            paths = Path(__file__).parent.glob(f"{prefix}*")
            hub.push({path.name.removeprefix(prefix): path.read_bytes() for path in paths}, branch)
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
        counts = {
            "requests": sum(len(server.requests) for server in self._all),
            "large": {name: _counted(server, path) for name, (server, path) in self._large.items()},
        }
        handler.reply(200, json.dumps(counts).encode(), {"Content-Type": "application/json"})


def _counted(server: Server, path: str) -> dict[str, Any]:
    """Return the offset at which each request for a file starts, and how many of its bytes were sent."""
    requests = [
        (method, target.partition("?")[0], headers) for method, target, headers in list(server.requests)
    ]
    gets = [headers for method, target, headers in requests if (method, target) == ("GET", path)]
    ranges = [
        next((value for name, value in headers.items() if name.lower() == "range"), "") for headers in gets
    ]
    with server.counting:
        sent = server.served[path]
    starts = [int(value.removeprefix("bytes=").partition("-")[0] or 0) for value in ranges]
    return {"starts": starts, "sent": sent}


if __name__ == "__main__":
    Sources(sys.argv[1])
    signal.pause()
