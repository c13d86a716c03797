# SPDX-License-Identifier: Apache-2.0
"""Connections to ASGI apps; tests control the client's end and the server's end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from mizzen.gateway.http import connection


class AppConnection:
    """A connection to an app; `server` is the protocol at the server's end, which tests can call directly."""

    def __init__(self, reader: Any, writer: Any, server: connection.BoundedProtocol) -> None:
        self.reader, self.writer, self.server = reader, writer, server

    def feed(self, *pieces: bytes) -> None:
        """Pass pieces of a request to the server's protocol, one by one."""
        for piece in pieces:
            self.server.data_received(piece)

    async def answer(self) -> tuple[int, bytes]:
        """Read a response with a content-length; return its status and body."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 60)
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return int(head.split()[1]), await asyncio.wait_for(self.reader.readexactly(size), 60)

    async def ended(self) -> bytes:
        """Read until the server has closed the connection."""
        return await asyncio.wait_for(self.reader.read(), 60)


@pytest.fixture
async def line() -> AsyncIterator[Callable[..., Any]]:
    """Return a function that opens a connection to an ASGI app."""
    async with contextlib.AsyncExitStack() as stack:

        async def opened(app: Any) -> AppConnection:
            config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
            config.load()
            state = ServerState()
            server = await asyncio.get_running_loop().create_server(
                lambda: connection.BoundedProtocol(config, state, {}), "127.0.0.1", 0
            )
            stack.callback(server.close)
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            stack.callback(writer.close)
            async with asyncio.timeout(60):
                while not state.connections:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            return AppConnection(reader, writer, next(iter(state.connections)))  # type: ignore[arg-type]

        yield opened
