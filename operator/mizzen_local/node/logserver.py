# SPDX-License-Identifier: Apache-2.0
"""The kubelet's log endpoint: serves container logs to the API server, for `kubectl logs`."""

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

from mizzen_local.logs import find_run_logs, tail_offset
from mizzen_local.pki import KUBELET_CLIENT

POLL_SECONDS = 0.2
CHUNK = 64 * 1024
UNSUPPORTED_OPTIONS = {"sinceSeconds": "--since", "sinceTime": "--since-time", "timestamps": "--timestamps"}

ContainerStateLookup = Callable[[str, str, str], str]
"""Function that returns a container's state, given the namespace, pod name and container name.

The state is `waiting`, `running` or `terminated`, or empty if the kubelet no longer runs the pod.
"""


@dataclass(frozen=True, slots=True)
class _LogRequest:
    """A parsed request for a container's log.

    `tail` is the maximum number of lines and `limit` the maximum number of bytes; None means no maximum.
    """

    namespace: str
    pod: str
    container: str
    follow: bool
    previous: bool
    tail: int | None
    limit: int | None

    @property
    def container_key(self) -> tuple[str, str, str]:
        return self.namespace, self.pod, self.container


@asynccontextmanager
async def serve_logs(folder: Path, host: str, state_of: ContainerStateLookup) -> AsyncIterator[int]:
    """Serve the logs of a node's containers until the context exits; yield the port.

    Args:
        folder: the cluster's folder.
        host: IP address to listen on.
        state_of: returns the current state of a container.
    """
    server = _LogServer(folder / "logs", state_of)
    app = web.Application()
    app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", server.logs)
    app.router.add_route("*", "/{rest:.*}", _reject_other_path)
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
    def __init__(self, folder: Path, state_of: ContainerStateLookup) -> None:
        self._folder = folder
        self._state_of = state_of

    async def logs(self, request: web.Request) -> web.StreamResponse:
        """Send a log; for a request with `follow`, also send new lines until the container's run has ended.

        Only the API server is accepted as a client, because it has checked whether the user may read the log.
        """
        if _common_name(request) != KUBELET_CLIENT:
            raise web.HTTPForbidden(text="only the API server may read logs here")
        log_request = _parse_request(request)
        path = self._find_log(log_request)
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        try:
            await self._send_log(request, response, log_request, path)
            await response.write_eof()
        except ConnectionError:
            pass  # the client has closed the connection
        return response

    def _find_log(self, log_request: _LogRequest) -> Path:
        """Return the path of the requested log.

        Raises:
            web.HTTPBadRequest: the log does not exist; the message is worded like the real kubelet's message.
        """
        run_logs = find_run_logs(self._folder, *log_request.container_key)
        is_waiting = self._state_of(*log_request.container_key) == "waiting"
        if log_request.previous and not is_waiting:
            # the last run is the current one; of a waiting container it is the previous one
            run_logs = run_logs[:-1]
        if not run_logs:
            kind, problem = (
                ("previous terminated ", "not found") if log_request.previous else ("", "is waiting to start")
            )
            _reject(f'{kind}container "{log_request.container}" in pod "{log_request.pod}" {problem}')
        return run_logs[-1]

    async def _send_log(
        self, request: web.Request, response: web.StreamResponse, log_request: _LogRequest, path: Path
    ) -> None:
        remaining = log_request.limit
        with path.open("rb") as file:
            file.seek(await asyncio.to_thread(tail_offset, path, log_request.tail))
            while remaining is None or remaining > 0:
                at_end = not log_request.follow or self._has_log_ended(log_request, path)
                if data := file.read(CHUNK if remaining is None else min(CHUNK, remaining)):
                    remaining = None if remaining is None else remaining - len(data)
                    await response.write(data)
                elif at_end or request.transport is None or request.transport.is_closing():
                    return
                else:
                    if os.fstat(file.fileno()).st_size < file.tell():
                        file.seek(0)  # the kubelet has truncated the log because of its size
                    await asyncio.sleep(POLL_SECONDS)

    def _has_log_ended(self, log_request: _LogRequest, path: Path) -> bool:
        newer = find_run_logs(self._folder, *log_request.container_key)[-1:] != [path]
        return log_request.previous or newer or self._state_of(*log_request.container_key) != "running"


def _parse_request(request: web.Request) -> _LogRequest:
    query: Mapping[str, str] = request.query
    for name, option in UNSUPPORTED_OPTIONS.items():
        if name in query:
            _reject(f"{option}: the node of mizzen-local does not record when a line was written")
    return _LogRequest(
        namespace=request.match_info["namespace"],
        pod=request.match_info["pod"],
        container=request.match_info["container"],
        follow=query.get("follow") == "true",
        previous=query.get("previous") == "true",
        tail=_parse_number(query, "tailLines"),
        limit=_parse_number(query, "limitBytes"),
    )


def _parse_number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "")
    if text and not text.isdecimal():
        _reject(f"{name} must be a number")
    return int(text) if text else None


def _common_name(request: web.Request) -> str:
    certificate: dict[str, Any] = request.get_extra_info("peercert") or {}
    return next(
        (value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"), ""
    )


def _reject(message: str) -> NoReturn:
    raise web.HTTPBadRequest(text=message)


async def _reject_other_path(request: web.Request) -> web.StreamResponse:
    """Reject `kubectl exec`, `attach` and `port-forward`; the message says how to reach pods instead."""
    message = (
        "the node of mizzen-local serves only logs; pods are processes of this machine, at their own IPs"
    )
    raise web.HTTPNotImplemented(text=message)
