# SPDX-License-Identifier: Apache-2.0
"""Probe the readiness of the processes of `mizzen serve` over HTTP."""

from __future__ import annotations

from http.client import HTTPConnection, HTTPException
from pathlib import Path

import msgspec

from mizzen.gateway.config import GatewayConfig
from mizzen.server.config import EngineConfig

PROBE_SECONDS = 2.0
PHASES = {
    "spawn": "starting",
    "import": "starting",
    "config": "reading the configuration",
    "weights": "loading weights",
    "kv": "allocating the KV cache",
    "graphs": "capturing CUDA graphs",
    "warmup": "warming up",
}


class ReadinessProbe:
    """Probe that checks whether a request would succeed.

    After each check, `state` describes how far the startup has progressed. `progress` is the finished share
    of the work in this state, 0 to 1, or None if it is not measured.
    """

    def __init__(self, engine: EngineConfig, gateway: GatewayConfig) -> None:
        self._engine, self._gateway = engine, gateway
        self._token = Path(gateway.admin_token_file or "").read_text() if gateway.admin_token_file else ""
        self.state = "starting"
        self.progress: float | None = None

    def check(self) -> bool:
        """Return whether both processes are ready and the gateway would route a request to the engine."""
        status, text = _get(self._engine.http_host, self._engine.http_port, "/readyz")
        if not status and self.state != "starting":
            return False  # the engine is exiting: keep showing its last state
        if status != 200:
            phase, self.progress = _parse_phase(text)
            self.state = f"engine: {phase}"
            return False
        self.state, self.progress = "gateway: connecting to the engine", None
        return self._is_routable()

    def _is_routable(self) -> bool:
        headers = {"Authorization": f"Bearer {self._token}"}
        status, text = _get(self._gateway.admin_host, self._gateway.admin_port, "/admin/engines", headers)
        if status != 200:
            return False
        engines = msgspec.json.decode(text).get("engines", ())
        return any(engine.get("state") == "serving" for engine in engines)


def _get(host: str, port: int, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """Send a GET request; return the status and body of the response, or status 0 if no server answers."""
    connection = HTTPConnection(host, port, timeout=PROBE_SECONDS)
    try:
        connection.request("GET", path, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except (OSError, HTTPException):
        return 0, ""
    finally:
        connection.close()


class _ReadyzBody(msgspec.Struct):
    """Fields of an engine's `/readyz` response that the probe uses."""

    phase: str = ""
    progress: float | None = None


def _parse_phase(text: str) -> tuple[str, float | None]:
    """Return the description and progress of the startup phase in the body of an engine's `/readyz`."""
    try:
        ready = msgspec.json.decode(text, type=_ReadyzBody)
    except msgspec.DecodeError:
        return "starting", None
    return PHASES.get(ready.phase, ready.phase or "starting"), ready.progress
