"""Connections when the server shuts down: no request on its way is lost."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import pytest

from http_apps import Echoing, Slow

GET = b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize("asked_before", [False, True], ids=["new", "kept"])
async def test_a_request_that_is_on_its_way_when_the_server_ends_is_answered(
    line: Any, asked_before: bool
) -> None:
    one = await line(Echoing())
    one.server.linger_seconds = 60.0
    if asked_before:
        one.writer.write(GET)
        assert await one.answer() == (200, b"/next ")
    one.server.shutdown()
    await asyncio.sleep(0.05)
    one.writer.write(GET)
    answered = await one.ended()
    assert answered.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nconnection: close\r\n" in answered
    assert answered.endswith(b"/next ")


@pytest.mark.parametrize("ends", [True, False], ids=["end of the server", "end of keep-alive"])
async def test_a_request_that_came_while_the_process_was_held_up_is_answered(line: Any, ends: bool) -> None:
    """Its loop may run timers before it reads: the request has come, and the connection counts as idle."""
    one = await line(Echoing())
    one.server.linger_seconds = 60.0
    one.writer.write(GET)
    assert await one.answer() == (200, b"/next ")
    if ends:
        one.server.shutdown()
    os.write(one.writer.get_extra_info("socket").fileno(), GET)
    (one.server._close_if_idle if ends else one.server.timeout_keep_alive_handler)()
    if not ends:
        assert await one.answer() == (200, b"/next ")
        return
    answered = await one.ended()
    assert b"\r\nconnection: close\r\n" in answered
    assert answered.endswith(b"/next ")


@pytest.mark.parametrize("ends", [True, False], ids=["end of the server", "end of keep-alive"])
async def test_an_idle_connection_that_its_client_has_left_is_closed(line: Any, ends: bool) -> None:
    one = await line(Echoing())
    one.server.linger_seconds = 0.05
    one.writer.write(GET)
    assert await one.answer() == (200, b"/next ")
    if ends:
        one.server.shutdown()
    one.writer.write_eof()
    (one.server._close_if_idle if ends else one.server.timeout_keep_alive_handler)()
    assert await one.ended() == b""


async def test_a_request_right_behind_an_answer_that_did_not_say_that_it_was_the_last(line: Any) -> None:
    app = Slow()
    one = await line(app)
    one.server.linger_seconds = 60.0
    one.writer.write(GET)
    await asyncio.wait_for(one.reader.readuntil(b"be"), 60)
    one.server.shutdown()
    app.end.set()
    assert await asyncio.wait_for(one.reader.readexactly(2), 60) == b"in"
    one.writer.write(GET)
    answered = await one.ended()
    assert b"\r\nconnection: close\r\n" in answered
    assert answered.endswith(b"bein")


async def test_an_idle_connection_ends_soon_when_the_server_does(line: Any) -> None:
    for wait in (0.0, 0.2):
        one = await line(Echoing())
        one.server.linger_seconds = wait
        began = time.monotonic()
        one.server.shutdown()
        assert await one.ended() == b""
        assert time.monotonic() - began >= wait


async def test_a_server_in_a_hurry_waits_for_answers_alone(line: Any) -> None:
    app = Slow()
    idle, busy = await line(app), await line(app)
    for one in (idle, busy):
        one.server.linger_seconds = 60.0
    busy.writer.write(GET)
    await asyncio.wait_for(busy.reader.readuntil(b"be"), 60)
    for one in (idle, busy):
        one.server.shutdown()
        one.server.stop_lingering()
    assert await idle.ended() == b""
    app.end.set()
    assert await busy.ended() == b"in"


async def test_a_head_that_has_begun_is_waited_for_when_the_server_ends(line: Any) -> None:
    one = await line(Echoing())
    one.server.linger_seconds = 0.05
    one.writer.write(GET[:9])
    await asyncio.sleep(0.05)
    one.server.shutdown()
    await asyncio.sleep(0.2)
    one.writer.write(GET[9:])
    assert (await one.ended()).endswith(b"/next ")
