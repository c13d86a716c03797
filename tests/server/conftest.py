# SPDX-License-Identifier: Apache-2.0
"""Model folders, engine processes and gateways for tests of the engine as a process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from live_processes import kill_tree
from mizzen.common.options import flag
from mizzen.wire.messages import Welcome
from ports import free_ports
from wire_gateway import Gateway


class EngineProcess:
    """A simulated engine that runs as a process with its supervisor, as in a pod."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.message = folder / "termination-log"
        self.port = free_ports()
        options = {
            "wire_bind": f"ipc://{folder}/wire",
            "http_port": self.port,
            "termination_message": self.message,
            "step_milliseconds": 10,
        } | options
        words = [word for name, value in options.items() for word in (flag(name), str(value))]
        self._gateways: list[Gateway] = []
        self._log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mizzen.server.simulate", *words], stderr=self._log
        )

    def get(self, path: str, method: str = "GET") -> tuple[int, Any]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                body, code = reply.read(), reply.status
        except urllib.error.HTTPError as error:
            body, code = error.read(), error.code
        except OSError:
            return 0, {}
        return code, body.decode() if path == "/metrics" else json.loads(body)

    def until(self, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"the condition did not come true; {self.log}"
            time.sleep(0.02)

    def ready(self) -> str:
        """Wait until the engine serves; return its endpoint."""
        self.until(lambda: self.get("/readyz")[0] == 200)
        return self.get("/readyz")[1]["wire"]

    def gateway(self) -> Gateway:
        self._gateways.append(Gateway(self.ready()))
        self._gateways[-1].expect(Welcome)
        return self._gateways[-1]

    @property
    def rank(self) -> psutil.Process:
        (rank,) = psutil.Process(self.process.pid).children()
        return rank

    @property
    def log(self) -> list[dict[str, Any]]:
        self._log.seek(0)
        return [json.loads(line) for line in self._log if line.startswith("{")]

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Return the values of all samples by name and label values; the label `model_name` is left out."""
        samples = {}
        for family in text_string_to_metric_families(self.get("/metrics")[1]):
            for sample in family.samples:
                labels = [value for key, value in sample.labels.items() if key != "model_name"]
                samples[(sample.name, *labels)] = sample.value
        return samples

    def wait(self, seconds: float = 60.0) -> int:
        return self.process.wait(seconds)

    def close(self) -> None:
        kill_tree(self.process)
        for gateway in self._gateways:
            gateway.close()
        self._log.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Model folder with the files that a simulated engine needs."""
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    config = {"vocab_size": 1000, "max_position_embeddings": 2048, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture
def start_engine(tmp_path: Path, model: Path) -> Iterator[Callable[..., EngineProcess]]:
    engines: list[EngineProcess] = []

    def start(**options: Any) -> EngineProcess:
        folder = tmp_path / f"engine-{len(engines)}"
        folder.mkdir()
        engines.append(EngineProcess(folder, {"model": model} | options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def connect() -> Iterator[Callable[[str], Gateway]]:
    """Return a function that connects a gateway to an endpoint; the test must read the gateway's Welcome."""
    gateways: list[Gateway] = []

    def make(endpoint: str) -> Gateway:
        gateways.append(Gateway(endpoint))
        return gateways[-1]

    yield make
    for gateway in gateways:
        gateway.close()
