"""A cluster of this machine's processes, with the API server behind a proxy that injects faults."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from mizzen_local import process
from mizzen_local.addresses import free_port
from mizzen_local.cluster import Cluster
from mizzen_local.controlplane import ControlPlane
from noloss.changes import Pod, Which

PROXY = Path(__file__).with_name("api_faults.py")
RANKS = ("mizzen.server.ranks.leader", "mizzen.server.ranks.simulated")
PROXY_SECONDS = 60.0


def proxy_command(plane: ControlPlane, port: int) -> list[str]:
    """The command of the fault proxy in front of a control plane, with the API server's own certificate."""
    pki = plane.folder / "pki"
    options = {
        "upstream": plane.server,
        "ca": str(plane.authority),
        "cert": str(pki / "apiserver.crt"),
        "key": str(pki / "apiserver.key"),
        "host": plane.addresses.host,
        "port": str(port),
    }
    return [
        sys.executable,
        str(PROXY),
        *(word for name, text in options.items() for word in (f"--{name}", text)),
    ]


class Site:
    """A cluster of processes; its pods reach the API server through the fault proxy."""

    def __init__(self, folder: Path) -> None:
        self.cluster = Cluster(folder)
        self.folder = self.cluster.state.folder
        self._proxy = ""

    def up(self) -> None:
        """Start it with the CRD and the operator."""
        self.cluster.up(
            gpus=0, operator=True, report=lambda line: print(line, file=sys.stderr), front=self._front
        )

    def down(self) -> None:
        """End everything."""
        self.cluster.down()

    def _front(self, plane: ControlPlane) -> str:
        port = free_port(plane.addresses.host)
        log, folder = self.folder / "logs/api-faults.log", self.folder
        started = process.start("api-faults", proxy_command(plane, port), log=log, folder=folder)
        self._proxy = f"https://{plane.addresses.host}:{port}"
        deadline = time.monotonic() + PROXY_SECONDS
        while not log.read_text().count("Running on"):
            if not started.alive() or time.monotonic() > deadline:
                raise AssertionError(f"the fault proxy did not start: {log.read_text()}")
            time.sleep(0.05)
        return self._proxy

    @property
    def kubectl(self) -> str:
        """Path of the program."""
        return str(Path(self.cluster.state.facts().assets) / "kubectl")

    @property
    def kubeconfig(self) -> Path:
        """The administrator's, which leads past the proxy."""
        return self.cluster.state.kubeconfig

    async def api_faults(self, share: float, seed: int = 0) -> dict[str, Any]:
        """Have the proxy fail a share of requests; returns what it did so far."""
        tls = ssl.create_default_context(cafile=str(self.folder / "pki/ca.crt"))
        body = {"share": share, "seed": seed}
        url = f"{self._proxy}/-/faults"
        async with (
            aiohttp.ClientSession(trust_env=False) as http,
            http.put(url, json=body, ssl=tls) as answer,
        ):
            return await answer.json()

    # ---- processes of pods ----

    async def kill(self, pod: Pod, which: Which) -> bool:
        """SIGKILL; False when there is no such process."""
        return await asyncio.to_thread(self._signal, pod, which, signal.SIGKILL)

    async def stop(self, pod: Pod, which: Which) -> bool:
        """SIGSTOP; False when there is no such process."""
        return await asyncio.to_thread(self._signal, pod, which, signal.SIGSTOP)

    async def go_on(self, pod: Pod) -> None:
        """SIGCONT, to all."""
        await asyncio.to_thread(self._signal, pod, "all", signal.SIGCONT)

    def _signal(self, pod: Pod, which: Which, number: int) -> bool:
        """Signal processes of a pod; tells whether there is one."""
        found = process.marked(f"{self.folder}/pods/{pod['metadata']['uid']}/")
        if which == "rank":
            found = [one for one in found if set(RANKS) & set(_command(one.pid))]
        elif which == "container":
            found = sorted(found, key=lambda one: (one.started, one.pid))[:1]
        for one in found:
            try:
                os.kill(one.pid, number)
            except ProcessLookupError:
                continue
        return bool(found)

    def cpu_seconds(self) -> float:
        """Seconds of CPU that all processes of the cluster have taken, those that ended included."""
        ticks = 0
        for one in process.marked(f"{self.folder}/"):
            try:
                fields = Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            ticks += sum(map(int, fields[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def operator(self) -> list[process.Process]:
        """The operator's processes."""
        found = process.marked(f"{self.folder}/pods/")
        return [one for one in found if any("mizzen-operator" in word for word in _command(one.pid))]


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
