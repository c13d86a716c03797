"""Serves container logs for `kubectl logs`: the part of the kubelet's API that it uses."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from aiohttp import web

from mizzen_local.logs import runs, tail_start
from mizzen_local.pki import KUBELET_CLIENT

POLL_SECONDS = 0.2
CHUNK = 64 * 1024
UNKNOWN_TIMES = {"sinceSeconds": "--since", "sinceTime": "--since-time", "timestamps": "--timestamps"}

StateOf = Callable[[str, str, str], str]
"""By namespace, pod and container: `waiting`, `running` or `terminated`; empty where the pod has ended."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request for a log, with its limits."""

    namespace: str
    pod: str
    container: str
    follow: bool
    previous: bool
    tail: int | None
    limit: int | None

    @property
    def where(self) -> tuple[str, str, str]:
        return self.namespace, self.pod, self.container


@asynccontextmanager
async def serve_logs(folder: Path, host: str, state_of: StateOf) -> AsyncIterator[int]:
    """Serve the logs of a node's containers for as long as the block lasts; gives the port.

    Args:
        folder: the cluster's.
        host: address to listen on.
        state_of: how a container is now.
    """
    server = _LogServer(folder / "logs", state_of)
    app = web.Application()
    app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", server.logs)
    app.router.add_route("*", "/{rest:.*}", _nothing_else)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, 0, ssl_context=_tls(folder / "pki"))
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _tls(pki: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(pki / "ca.crt"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(pki / "kubelet.crt", pki / "kubelet.key")
    return context


class _LogServer:
    def __init__(self, folder: Path, state_of: StateOf) -> None:
        self._folder = folder
        self._state_of = state_of

    async def logs(self, request: web.Request) -> web.StreamResponse:
        """Answer with a log; where it is followed, with what comes, too, for as long as its container runs.

        Whether a user may read it is for the API server to say, so nobody else is answered.
        """
        if _common_name(request) != KUBELET_CLIENT:
            raise web.HTTPForbidden(text="only the API server reads logs here")
        asked = _asked(request)
        path = self._find(asked)
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        try:
            await self._send(request, response, asked, path)
            await response.write_eof()
        except ConnectionError:
            pass  # whoever asked has heard enough
        return response

    def _find(self, asked: _Asked) -> Path:
        """The log that is asked for.

        Raises:
            web.HTTPBadRequest: there is none; in a kubelet's words.
        """
        found = runs(self._folder, *asked.where)
        waits = self._state_of(*asked.where) == "waiting"
        if asked.previous and not waits:
            found = found[:-1]  # what waits to be started again has ended last with its last run
        if not found:
            kind, end = (
                ("previous terminated ", "not found") if asked.previous else ("", "is waiting to start")
            )
            _refuse(f'{kind}container "{asked.container}" in pod "{asked.pod}" {end}')
        return found[-1]

    async def _send(
        self, request: web.Request, response: web.StreamResponse, asked: _Asked, path: Path
    ) -> None:
        left = asked.limit
        with path.open("rb") as file:
            file.seek(await asyncio.to_thread(tail_start, path, asked.tail))
            while left is None or left > 0:
                over = not asked.follow or self._has_ended(asked, path)
                if data := file.read(CHUNK if left is None else min(CHUNK, left)):
                    left = None if left is None else left - len(data)
                    await response.write(data)
                elif over or request.transport is None or request.transport.is_closing():
                    return
                else:
                    if os.fstat(file.fileno()).st_size < file.tell():
                        file.seek(0)  # it grew too large, and has begun anew
                    await asyncio.sleep(POLL_SECONDS)

    def _has_ended(self, asked: _Asked, path: Path) -> bool:
        newer = runs(self._folder, *asked.where)[-1:] != [path]
        return asked.previous or newer or self._state_of(*asked.where) != "running"


def _asked(request: web.Request) -> _Asked:
    query: Mapping[str, str] = request.query
    for name, option in UNKNOWN_TIMES.items():
        if name in query:
            _refuse(f"{option}: the node of mizzen-local does not know when a line was written")
    return _Asked(
        request.match_info["namespace"],
        request.match_info["pod"],
        request.match_info["container"],
        query.get("follow") == "true",
        query.get("previous") == "true",
        _number(query, "tailLines"),
        _number(query, "limitBytes"),
    )


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "")
    if text and not text.isdecimal():
        _refuse(f"{name} must be a number")
    return int(text) if text else None


def _common_name(request: web.Request) -> str:
    certificate: dict[str, Any] = request.get_extra_info("peercert") or {}
    return next(
        (value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"), ""
    )


def _refuse(message: str) -> NoReturn:
    raise web.HTTPBadRequest(text=message)


async def _nothing_else(request: web.Request) -> web.StreamResponse:
    """Say what there is in place of `kubectl exec`, `attach` and `port-forward`."""
    message = (
        "the node of mizzen-local serves logs alone; pods are processes of this machine, at their own IPs"
    )
    raise web.HTTPNotImplemented(text=message)
