# SPDX-License-Identifier: Apache-2.0
"""Engines and gateways of any release as processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from noloss.changes import until
from previous_release import CURRENT, Release

from live_processes import kill_tree
from ports import free_ports

MODEL = CURRENT.root / "models" / "demo"


class Program:
    """A process of a release, with a folder for its log."""

    def __init__(self, release: Release, folder: Path, module: str, *words: str) -> None:
        folder.mkdir(parents=True)
        self.release, self.log = release, folder / "log"
        with self.log.open("w") as log:
            self.process = psutil.Popen(
                [*release.command(module), *words],
                env=release.environment,
                cwd=folder,
                stdout=log,
                stderr=log,
            )

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    async def wait(self) -> int:
        """Return the exit code once the process has ended."""

        async def ended() -> bool:
            return self.process.poll() is not None

        await until(ended, f"the end of {self.log}")
        return self.process.returncode

    def kill(self) -> None:
        """Kill the process and its children."""
        kill_tree(self.process)


class Engine(Program):
    """An engine at one of the endpoints, with a simulated or a real model."""

    def __init__(
        self,
        release: Release,
        folder: Path,
        endpoint: str,
        *,
        simulated: bool,
        model: Path = MODEL,
        more: tuple[str, ...] = (),
    ) -> None:
        """Start an engine; `more` are further words of its command line."""
        self.name = endpoint
        """The engine's name in the routing table of a gateway that does not watch pods."""
        options = {
            "model": model,
            "served-name": "demo",
            "revision": release.name,
            "wire-bind": endpoint,
            "http-port": free_ports(),
            "termination-message": folder / "end",
            "max-running-requests": 64,
        }
        if simulated:
            words = ["--step-milliseconds", "8"]
        else:
            words = ["--device", "cpu", "--threads", "1", "--kv-cache-tokens", "32768"]
        words += [word for name, value in options.items() for word in (f"--{name}", str(value))]
        words += more
        module = "mizzen.server.simulate" if simulated else "mizzen.cli"
        super().__init__(release, folder, module, *([] if simulated else ["engine"]), *words)

    def kill_rank(self) -> None:
        """Send SIGKILL to the process that runs the model; the engine then ends."""
        for child in self.process.children():
            child.kill()


class Gateway(Program):
    """A gateway that knows all endpoints of engines."""

    def __init__(self, release: Release, folder: Path, endpoints: list[str]) -> None:
        port = free_ports(count=2)
        self.url, self._admin = f"http://127.0.0.1:{port}/v1", f"http://127.0.0.1:{port + 1}"
        folder.mkdir(parents=True)
        token = folder / "token"
        token.write_text("s3cret")
        options = {
            "served-name": "demo",
            "host": "127.0.0.1",
            "port": port,
            "admin-host": "127.0.0.1",
            "admin-port": port + 1,
            "admin-token-file": token,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        words += [word for endpoint in endpoints for word in ("--engine", endpoint)]
        super().__init__(release, folder / "run", "mizzen.cli", "gateway", *words)

    async def _get(self, path: str) -> str:
        timeout = aiohttp.ClientTimeout(total=10)
        headers = {"authorization": "Bearer s3cret"}
        async with (
            aiohttp.ClientSession(trust_env=False, timeout=timeout, headers=headers) as http,
            http.get(self._admin + path) as answer,
        ):
            return await answer.text()

    async def engines(self) -> dict[str, dict[str, Any]]:
        """Return the serving engines of the routing table, by name; empty while the gateway starts."""
        try:
            table = json.loads(await self._get("/admin/engines"))
        except (aiohttp.ClientError, TimeoutError):
            return {}
        return {engine["name"]: engine for engine in table["engines"] if engine["state"] == "serving"}

    async def resumes(self) -> int:
        """Return the number of answers that went on in another engine."""
        lines = (await self._get("/metrics")).splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if "resumes_total{" in line)
