# SPDX-License-Identifier: Apache-2.0
"""`mizzen engine` with the demo model as a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from live_processes import kill_tree
from mizzen.common.addresses import join_address
from mizzen.common.options import flag
from ports import free_ports

DEMO = Path(__file__).parents[2] / "models" / "demo"
SECONDS = 180.0
"""Timeout of each wait, in seconds."""


class EngineProcess:
    """A process of an engine that runs the demo model with two ranks on the CPU."""

    def __init__(self, folder: Path, address: str = "127.0.0.1", **options: Any) -> None:
        """Start the engine.

        Args:
            folder: Folder for the log, the termination message and the wire socket.
            address: Address of the engine's HTTP server.
            options: Options of `mizzen engine` that override or extend the defaults.
        """
        self.message, self.log, self.address = folder / "termination-log", folder / "log", address
        self.port = free_ports(address)
        values = {
            "model": DEMO,
            "device": "cpu",
            "tensor": 2,
            "threads": 1,
            "kv_cache_tokens": 4096,
            "wire_bind": f"ipc://{folder}/wire",
            "http_host": address,
            "http_port": self.port,
            "termination_message": self.message,
            **options,
        }
        words = [word for name, value in values.items() for word in (flag(name), str(value))]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mizzen.cli", "engine", *words], stderr=log
            )

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON body at a path; an empty object if the engine does not answer."""
        try:
            with urllib.request.urlopen(
                f"http://{join_address(self.address, self.port)}{path}", timeout=5
            ) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return json.loads(error.read())
        except OSError:
            return {}

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until a condition is true, and return its value; fail if the engine exits before that."""
        deadline = time.monotonic() + SECONDS
        while not (value := condition()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return value

    def close(self) -> None:
        """Kill the engine and all of its ranks."""
        kill_tree(self.process, SECONDS)
