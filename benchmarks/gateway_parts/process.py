# SPDX-License-Identifier: Apache-2.0
"""Runs the gateway under test as a real command, and measures the CPU time and memory of its processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray


def free_ports(count: int) -> list[int]:
    """Return `count` free TCP ports of the loopback address."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


class GatewayProcess:
    """Context manager that runs a gateway command, which serves the engines at `endpoints`."""

    def __init__(self, endpoints: list[str], cores: set[int], options: list[str]) -> None:
        self.port, self.admin_port = free_ports(2)
        command = [sys.executable, "-m", "mizzen.cli", "gateway", "--served-name", "bench"]
        command += ["--port", str(self.port), "--admin-port", str(self.admin_port)]
        command += [part for endpoint in endpoints for part in ("--engine", endpoint)] + options
        self._log = tempfile.NamedTemporaryFile(prefix="gateway-load-", suffix=".log")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stderr=self._log, stdout=self._log, preexec_fn=lambda: os.sched_setaffinity(0, cores)
        )
        self._measured = psutil.Process(self._process.pid)
        try:
            self._wait(len(endpoints))
        except BaseException:
            self._process.kill()
            raise

    def _wait(self, engines: int, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        pattern = re.compile(r'mizzen_gateway_engines\{[^}]*state="serving"[^}]*\} ([0-9.]+)')
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                match = pattern.search(self.metrics())
            except OSError:
                match = None
            if match and float(match[1]) == engines:
                return
            time.sleep(0.1)
        raise RuntimeError(f"the gateway does not serve: {Path(self._log.name).read_text()[-2000:]}")

    def metrics(self) -> str:
        """Return the text of the gateway's /metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/metrics", timeout=10) as answer:
            return answer.read().decode()

    def _all(self) -> list[psutil.Process]:
        return [self._measured, *self._measured.children(recursive=True)]

    def cpu(self) -> float:
        """Return the user and system CPU-seconds that all processes of the gateway have used so far."""
        times = [process.cpu_times() for process in self._all()]
        return sum(usage.user + usage.system for usage in times)

    def memory(self) -> int:
        """Return the resident memory of all processes of the gateway in bytes."""
        return sum(process.memory_info().rss for process in self._all())

    @property
    def pid(self) -> int:
        """Process id of the gateway's main process."""
        return self._process.pid

    def __enter__(self) -> GatewayProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGINT)
            self._process.kill()
            self._process.wait()
        self._log.close()


class CpuMeter:
    """Samples a gateway's CPU time during a run; computes the CPU time of any span from the samples."""

    def __init__(self, gateway: GatewayProcess, interval: float = 0.1) -> None:
        self._gateway = gateway
        self._interval = interval
        self._stop = threading.Event()
        self._samples: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._sample()

    def _sample(self) -> None:
        self._samples.append((time.monotonic(), self._gateway.cpu()))

    def __enter__(self) -> CpuMeter:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def seconds(self, began: float, ended: float) -> float:
        """Return the CPU-seconds that the gateway used between two times of the monotonic clock."""
        samples: NDArray[np.float64] = np.array(self._samples)
        first, last = np.interp([began, ended], samples[:, 0], samples[:, 1])
        return float(last - first)
