# SPDX-License-Identifier: Apache-2.0
"""A cluster of processes on this machine, whose API server is behind the fault proxy `api_faults.py`."""

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
from mizzen_local.addresses import find_free_port
from mizzen_local.cluster import Cluster
from mizzen_local.controlplane import ControlPlane
from noloss.changes import Pod, Which

PROXY = Path(__file__).with_name("api_faults.py")
RANKS = ("mizzen.server.ranks.leader", "mizzen.server.ranks.simulated")
PROXY_SECONDS = 60.0


def proxy_command(plane: ControlPlane, port: int) -> list[str]:
    """Return the command of a fault proxy for a control plane; it uses the API server's certificate."""
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
    """A cluster of processes whose pods reach the API server through the fault proxy."""

    def __init__(self, folder: Path) -> None:
        self.cluster = Cluster(folder)
        self.folder = self.cluster.state.folder
        self._proxy = ""

    def up(self) -> None:
        """Start the cluster with the CRD and the operator."""
        self.cluster.up(
            gpus=0,
            operator=True,
            report=lambda line: print(line, file=sys.stderr),
            start_proxy=self._start_proxy,
        )

    def down(self) -> None:
        """Stop the cluster and the fault proxy."""
        self.cluster.down()

    def _start_proxy(self, plane: ControlPlane) -> str:
        port = find_free_port(plane.addresses.host)
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
        """Path of kubectl."""
        return str(Path(self.cluster.state.read_settings().assets) / "kubectl")

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig, which bypasses the fault proxy."""
        return self.cluster.state.kubeconfig

    async def api_faults(self, share: float, seed: int = 0) -> dict[str, Any]:
        """Inject faults into a share of the API requests; return how many were injected so far, by kind."""
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
        """SIGKILL processes of a pod; return False if no such process exists."""
        return await asyncio.to_thread(self._signal, pod, which, signal.SIGKILL)

    async def stop(self, pod: Pod, which: Which) -> bool:
        """SIGSTOP processes of a pod; return False if no such process exists."""
        return await asyncio.to_thread(self._signal, pod, which, signal.SIGSTOP)

    async def resume(self, pod: Pod) -> None:
        """SIGCONT all processes of a pod."""
        await asyncio.to_thread(self._signal, pod, "all", signal.SIGCONT)

    def _signal(self, pod: Pod, which: Which, number: int) -> bool:
        """Send a signal to processes of a pod; return False if no such process exists."""
        processes = process.find_marked(f"{self.folder}/pods/{pod['metadata']['uid']}/")
        if which == "rank":
            processes = [p for p in processes if set(RANKS) & set(_command(p.pid))]
        elif which == "container":
            processes = sorted(processes, key=lambda p: (p.started, p.pid))[:1]
        for target in processes:
            try:
                os.kill(target.pid, number)
            except ProcessLookupError:
                continue
        return bool(processes)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds used by all processes of the cluster and by their children that ended."""
        ticks = 0
        for running in process.find_marked(f"{self.folder}/"):
            try:
                fields = Path(f"/proc/{running.pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            ticks += sum(map(int, fields[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def operator(self) -> list[process.Process]:
        """Return the operator's processes."""
        processes = process.find_marked(f"{self.folder}/pods/")
        return [p for p in processes if any("mizzen-operator" in word for word in _command(p.pid))]


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
