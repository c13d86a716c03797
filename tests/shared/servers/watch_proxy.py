# SPDX-License-Identifier: Apache-2.0
"""A proxy that cuts, mutes and refuses the watches of an API server."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
from aiohttp import web

from mizzen_local.controlplane import ControlPlane


class Proxy:
    """Forwards requests to the API server.

    `fault` is called for each request; it may return a response, which is sent instead, or raise
    an error, which closes the connection.
    """

    def __init__(self, plane: ControlPlane) -> None:
        pki = plane.folder / "pki"
        self._tls = ssl.create_default_context(cafile=str(plane.authority))
        self._tls.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        self._upstream = plane.server
        self.fault: Callable[[web.Request], Awaitable[web.StreamResponse | None]] = self.none
        self.mute_watches = False
        """Whether open watches drop their events; after a dropped event, a watch stays silent for good."""
        self.lists: list[str] = []
        self.watches: dict[asyncio.Transport, str] = {}
        """Plural name of the watched kind, by connection."""

    async def none(self, request: web.Request) -> None:
        """Inject no fault."""

    def watching(self, plural: str) -> set[asyncio.Transport]:
        """Return the connections of the watches of a kind."""
        return {connection for connection, watched in self.watches.items() if watched == plural}

    def cut(self) -> None:
        """Abort the connections of all watches, even in the middle of an event."""
        for connection in self.watches:
            connection.abort()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", self._pass)
            runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            try:
                yield f"http://127.0.0.1:{runner.addresses[0][1]}"
            finally:
                await runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        watching = "watch" in request.query
        if not watching:
            self.lists.append(request.path.rpartition("/")[2])
        answer = await self.fault(request)
        if answer is not None:
            return answer
        url = self._upstream + request.path_qs
        headers = {key: request.headers[key] for key in ("Accept", "Content-Type") if key in request.headers}
        body = await request.read() or None
        async with self._session.request(request.method, url, headers=headers, data=body) as upstream:
            response = web.StreamResponse(status=upstream.status)
            response.content_type = "application/json"
            await response.prepare(request)
            connection = request.transport
            if watching and connection is not None:
                self.watches[connection] = request.path.rpartition("/")[2]
            silent = False
            try:
                async for part in upstream.content.iter_any():
                    silent |= watching and self.mute_watches  # on one connection, no event follows a lost one
                    if not silent:
                        await response.write(part)
            finally:
                self.watches.pop(connection, None)
            return response
