# SPDX-License-Identifier: Apache-2.0
"""Runs the handlers of probes and lifecycle hooks: exec, httpGet, tcpSocket and sleep."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

MAX_OUTPUT_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Target:
    """The container that a handler is run for.

    Attributes:
        address: IP address of the pod.
        ports: numbers of the container's named ports.
        folder: working directory of `exec` commands.
        environment: environment variables of `exec` commands.
        session: HTTP client for `httpGet`.
    """

    address: str
    ports: Mapping[str, int]
    folder: Path
    environment: Mapping[str, str]
    session: aiohttp.ClientSession

    def port(self, port: int | str) -> int:
        """Return a port's number, given its number or name.

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
        ok: whether the handler succeeded.
        message: exit code and output, HTTP status and body, or error; it is used in Events about failures.
    """

    ok: bool
    message: str = ""


async def run(handler: Mapping[str, Any], target: Target, timeout: float) -> Outcome:
    """Run a handler; its failure is returned, not raised.

    Args:
        handler: a mapping with one of `exec`, `httpGet`, `tcpSocket` and `sleep`.
        target: the container to run it for.
        timeout: seconds after which the handler counts as failed.
    """
    try:
        async with asyncio.timeout(timeout):
            if "exec" in handler:
                return await _run_command(handler["exec"]["command"], target)
            if "httpGet" in handler:
                return await _get_http(handler["httpGet"], target)
            if "tcpSocket" in handler:
                return await _connect_tcp(handler["tcpSocket"], target)
            if "sleep" in handler:
                await asyncio.sleep(handler["sleep"]["seconds"])
                return Outcome(True)
    except TimeoutError:
        return Outcome(False, f"timed out after {timeout:g} s")
    except (OSError, ValueError, aiohttp.ClientError) as error:
        return Outcome(False, str(error))
    return Outcome(False, f"mizzen-local does not support this handler: {', '.join(handler)}")


async def _run_command(command: Sequence[str], target: Target) -> Outcome:
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
    text = output[-MAX_OUTPUT_BYTES:].decode(errors="replace").strip()
    return Outcome(child.returncode == 0, f"exit code {child.returncode}: {text}")


async def _get_http(action: Mapping[str, Any], target: Target) -> Outcome:
    scheme = action.get("scheme", "HTTP").lower()
    host = action.get("host") or target.address
    path = "/" + action.get("path", "/").lstrip("/")
    url = f"{scheme}://{host}:{target.port(action['port'])}{path}"
    headers = {"User-Agent": "kube-probe/mizzen-local"}
    headers |= {entry["name"]: entry["value"] for entry in action.get("httpHeaders", ())}
    async with target.session.get(url, headers=headers, allow_redirects=False, ssl=False) as response:
        body = (await response.content.read(MAX_OUTPUT_BYTES)).decode(errors="replace").strip()
        return Outcome(200 <= response.status < 400, f"HTTP status {response.status}: {body}")


async def _connect_tcp(action: Mapping[str, Any], target: Target) -> Outcome:
    host = action.get("host") or target.address
    _, writer = await asyncio.open_connection(host, target.port(action["port"]))
    writer.close()
    return Outcome(True)
