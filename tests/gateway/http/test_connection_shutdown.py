# SPDX-License-Identifier: Apache-2.0
"""Connections at shutdown: a request that has been sent is answered."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import pytest

from http_apps import Echoing, Slow

GET = b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize("keep_alive", [False, True], ids=["new connection", "kept-alive connection"])
async def test_request_on_its_way_at_shutdown_is_answered(line: Any, keep_alive: bool) -> None:
    connection = await line(Echoing())
    connection.server.linger_seconds = 60.0
    if keep_alive:
        connection.writer.write(GET)
        assert await connection.answer() == (200, b"/next ")
    connection.server.shutdown()
    await asyncio.sleep(0.05)
    connection.writer.write(GET)
    response = await connection.ended()
    assert response.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nconnection: close\r\n" in response
    assert response.endswith(b"/next ")


@pytest.mark.parametrize("ends", [True, False], ids=["end of the server", "end of keep-alive"])
async def test_request_that_arrived_while_the_process_was_stalled_is_answered(line: Any, ends: bool) -> None:
    """After a stall, the event loop may run timers before it reads, so the connection still seems idle."""
    connection = await line(Echoing())
    connection.server.linger_seconds = 60.0
    connection.writer.write(GET)
    assert await connection.answer() == (200, b"/next ")
    if ends:
        connection.server.shutdown()
    os.write(connection.writer.get_extra_info("socket").fileno(), GET)
    (connection.server._close_if_idle if ends else connection.server.timeout_keep_alive_handler)()
    if not ends:
        assert await connection.answer() == (200, b"/next ")
        return
    response = await connection.ended()
    assert b"\r\nconnection: close\r\n" in response
    assert response.endswith(b"/next ")


@pytest.mark.parametrize("ends", [True, False], ids=["end of the server", "end of keep-alive"])
async def test_idle_connection_whose_client_disconnected_is_closed(line: Any, ends: bool) -> None:
    connection = await line(Echoing())
    connection.server.linger_seconds = 0.05
    connection.writer.write(GET)
    assert await connection.answer() == (200, b"/next ")
    if ends:
        connection.server.shutdown()
    connection.writer.write_eof()
    (connection.server._close_if_idle if ends else connection.server.timeout_keep_alive_handler)()
    assert await connection.ended() == b""


async def test_request_after_a_response_without_connection_close_is_answered(line: Any) -> None:
    app = Slow()
    connection = await line(app)
    connection.server.linger_seconds = 60.0
    connection.writer.write(GET)
    await asyncio.wait_for(connection.reader.readuntil(b"be"), 60)
    connection.server.shutdown()
    app.end.set()
    assert await asyncio.wait_for(connection.reader.readexactly(2), 60) == b"in"
    connection.writer.write(GET)
    response = await connection.ended()
    assert b"\r\nconnection: close\r\n" in response
    assert response.endswith(b"bein")


async def test_idle_connection_closes_after_its_linger_time(line: Any) -> None:
    for wait in (0.0, 0.2):
        connection = await line(Echoing())
        connection.server.linger_seconds = wait
        began = time.monotonic()
        connection.server.shutdown()
        assert await connection.ended() == b""
        assert time.monotonic() - began >= wait


async def test_stop_lingering_only_waits_for_responses(line: Any) -> None:
    app = Slow()
    idle, busy = await line(app), await line(app)
    for connection in (idle, busy):
        connection.server.linger_seconds = 60.0
    busy.writer.write(GET)
    await asyncio.wait_for(busy.reader.readuntil(b"be"), 60)
    for connection in (idle, busy):
        connection.server.shutdown()
        connection.server.stop_lingering()
    assert await idle.ended() == b""
    app.end.set()
    assert await busy.ended() == b"in"


async def test_started_head_is_awaited_at_shutdown(line: Any) -> None:
    connection = await line(Echoing())
    connection.server.linger_seconds = 0.05
    connection.writer.write(GET[:9])
    await asyncio.sleep(0.05)
    connection.server.shutdown()
    await asyncio.sleep(0.2)
    connection.writer.write(GET[9:])
    assert (await connection.ended()).endswith(b"/next ")
