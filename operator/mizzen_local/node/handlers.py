"""Handlers of probes and lifecycle hooks: exec, httpGet, tcpSocket, sleep."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

MOST_OUTPUT = 1024


@dataclass(frozen=True, slots=True)
class Target:
    """The container that handlers act on.

    Attributes:
        address: the pod's address.
        ports: the container's named ports.
        folder: working directory of commands.
        environment: variables of commands.
        session: HTTP client.
    """

    address: str
    ports: Mapping[str, int]
    folder: Path
    environment: Mapping[str, str]
    session: aiohttp.ClientSession

    def port(self, port: int | str) -> int:
        """A port by number or name.

        Raises:
            ValueError: the container has no port of that name.
        """
        if isinstance(port, int) or port.isdigit():
            return int(port)
        if port not in self.ports:
            raise ValueError(f"the container has no port named {port!r}")
        return self.ports[port]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a handler.

    Attributes:
        ok: whether it succeeded.
        message: why not.
    """

    ok: bool
    message: str = ""


async def run(handler: Mapping[str, Any], target: Target, timeout: float) -> Outcome:
    """Run a handler; no failure of it raises.

    Args:
        handler: one of `exec`, `httpGet`, `tcpSocket`, `sleep` and its fields.
        target: the container.
        timeout: seconds after which it has failed.
    """
    try:
        async with asyncio.timeout(timeout):
            if "exec" in handler:
                return await _exec(handler["exec"]["command"], target)
            if "httpGet" in handler:
                return await _http(handler["httpGet"], target)
            if "tcpSocket" in handler:
                return await _tcp(handler["tcpSocket"], target)
            if "sleep" in handler:
                await asyncio.sleep(handler["sleep"]["seconds"])
                return Outcome(True)
    except TimeoutError:
        return Outcome(False, f"no answer within {timeout:g} s")
    except (OSError, ValueError, aiohttp.ClientError) as error:
        return Outcome(False, str(error))
    return Outcome(False, f"mizzen-local does not know this handler: {', '.join(handler)}")


async def _exec(command: Sequence[str], target: Target) -> Outcome:
    child = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=target.folder,
        env=dict(target.environment),
        start_new_session=True,
    )
    try:
        output, _ = await child.communicate()
    finally:
        if child.returncode is None:
            os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
    text = output[-MOST_OUTPUT:].decode(errors="replace").strip()
    return Outcome(child.returncode == 0, f"exit code {child.returncode}: {text}")


async def _http(action: Mapping[str, Any], target: Target) -> Outcome:
    scheme = action.get("scheme", "HTTP").lower()
    host = action.get("host") or target.address
    path = "/" + action.get("path", "/").lstrip("/")
    url = f"{scheme}://{host}:{target.port(action['port'])}{path}"
    headers = {"User-Agent": "kube-probe/mizzen-local"}
    headers |= {entry["name"]: entry["value"] for entry in action.get("httpHeaders", ())}
    async with target.session.get(url, headers=headers, allow_redirects=False, ssl=False) as response:
        body = (await response.content.read(MOST_OUTPUT)).decode(errors="replace").strip()
        return Outcome(200 <= response.status < 400, f"HTTP status {response.status}: {body}")


async def _tcp(action: Mapping[str, Any], target: Target) -> Outcome:
    host = action.get("host") or target.address
    _, writer = await asyncio.open_connection(host, target.port(action["port"]))
    writer.close()
    return Outcome(True)
