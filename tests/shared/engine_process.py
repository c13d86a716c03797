"""`mizzen engine` with the demo model as a process of its own."""

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

import psutil

from mizzen.common.options import flag
from ports import free_ports

DEMO = Path(__file__).parents[2] / "models" / "demo"
SECONDS = 180.0
"""For everything that is waited for."""


class EngineProcess:
    """An engine of two ranks on the CPU."""

    def __init__(self, folder: Path, address: str = "127.0.0.1", **options: Any) -> None:
        """Start it.

        Args:
            folder: for its log, its termination message and its wire.
            address: where it answers over HTTP.
            options: of `mizzen engine`, in place of or besides those that all have.
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
        """What it answers at a path; nothing when it does not."""
        try:
            with urllib.request.urlopen(f"http://{self.address}:{self.port}{path}", timeout=5) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return json.loads(error.read())
        except OSError:
            return {}

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait for a condition while the process lives; return what it gave."""
        deadline = time.monotonic() + SECONDS
        while not (found := condition()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return found

    def close(self) -> None:
        """Kill it with all of its ranks."""
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
            self.process.wait(SECONDS)
