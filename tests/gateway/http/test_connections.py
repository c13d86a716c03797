# SPDX-License-Identifier: Apache-2.0
"""Clients that send too much or too slowly, do not read, or disconnect."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import pytest

from http_apps import Echoing, Refusing, Waiting
from mizzen.gateway.http import connection

BODY = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 3}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def connect(gateway: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = gateway.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def test_endless_headers_are_rejected(live: Any, scripted: Any) -> None:
    gateway = await live(scripted())
    reader, writer = await connect(gateway)
    writer.write(HEAD)
    sent = 0
    answer = asyncio.create_task(reader.read(100))
    while not answer.done() and sent < 64 << 20:
        writer.write(b"x-%d: %s\r\n" % (sent, b"a" * 8000))
        sent += 8000
        await asyncio.wait([answer], timeout=0.0001)
        if not answer.done():
            await writer.drain()
    assert (await answer).startswith(b"HTTP/1.1 431 ")
    assert sent < 8 << 20
    writer.close()
    assert (
        await httpx.AsyncClient(timeout=60).post(f"{gateway.url}/v1/completions", json=BODY)
    ).status_code == 200


@pytest.mark.parametrize("drip", [b"", b"\r\n", b"x"])
async def test_unfinished_head_closes_the_connection(
    live: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch, drip: bytes
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_SECONDS", 0.3)
    gateway = await live(scripted())
    began = time.monotonic()
    reader, writer = await connect(gateway)
    writer.write(HEAD if drip == b"x" else b"")
    end = asyncio.create_task(reader.read())
    while not end.done() and time.monotonic() - began < 60:
        await asyncio.wait([end], timeout=0.05)
        if drip and not end.done():
            writer.write(drip)
    assert end.done()
    assert time.monotonic() - began > 0.29
    writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_connection_of_a_client_that_does_not_read_is_closed(
    live: Any, scripted: Any, until: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A stream is discarded; so is a complete response that still waits in the connection's buffer."""
    monkeypatch.setattr(connection, "WRITE_STALL_SECONDS", 0.3)
    engine = scripted(context_length=100_000)
    engine.does.tokens_a_step = 1000
    gateway = await live(engine)
    gateway._sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    connections = gateway._servers[0].server_state.connections
    body = json.dumps({**BODY, "max_tokens": 90_000, "stream": stream, "return_token_ids": True}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        host, port = gateway.url.removeprefix("http://").split(":")
        client.connect((host, int(port)))
        client.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: engine.requests)
        await until(lambda: not connections)
        await until(lambda: not gateway.gateway.in_flight)
        assert not engine.running


async def test_slow_bodies_long_streams_and_keep_alive_are_not_closed(
    live: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = scripted()
    engine.does.step_seconds = 0.05
    gateway = await live(engine)
    reader, writer = await connect(gateway)
    monkeypatch.setattr(
        connection, "HEAD_TIMEOUT_SECONDS", 0.3
    )  # from now on, all heads are sent in one piece, so this is enough even on a busy machine
    for _ in range(2):
        body = json.dumps({**BODY, "max_tokens": 15, "stream": True}).encode()
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 10):
            writer.write(body[start : start + 10])
            await asyncio.sleep(0.07)
        stream = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 60)
        assert stream.startswith(b"HTTP/1.1 200")
        assert b"data: [DONE]" in stream
        await asyncio.sleep(0.6)
    writer.close()


CHUNKED = b"POST /outer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


AROUND = {"trailers": (b"0\r\n", b"a:b\r\n"), "trailer": (b"0\r\na:", b"b"), "size": (b"1;", b"a")}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("refused", [False, True])
async def test_trailers_and_chunk_framing_are_bounded(line: Any, around: str, refused: bool) -> None:
    connected = await line(Refusing() if refused else Echoing())
    connected.feed(CHUNKED + b"5\r\nhello\r\n")
    if refused:
        assert await connected.answer() == (401, b"")
    begin, more = AROUND[around]
    connected.feed(begin, *[more * (16384 // len(more))] * 64)
    assert connected.server.transport.is_closing()
    assert len(connected.server.headers) == 2
    assert await connected.ended() == b""


async def test_trailers_are_dropped(line: Any) -> None:
    app = Echoing()
    connected = await line(app)
    for sent in (CHUNKED + b"5\r\nhello\r\n0\r\nx-sum: 1\r\nexpect: 100-continue\r\n\r\n",) * 2:
        connected.feed(*(sent[at : at + 1] for at in range(len(sent))))
        assert await connected.answer() == (200, b"/outer hello")
    assert [[name for name, _ in scope["headers"]] for scope in app.scopes] == [
        [b"host", b"transfer-encoding"]
    ] * 2


async def test_many_small_chunks_do_not_count_as_a_head(line: Any) -> None:
    connected = await line(Echoing())
    connected.feed(CHUNKED, *[b"1;a=b\r\nx\r\n" for _ in range(connection.MAX_HEAD_BYTES // 5)], b"0\r\n\r\n")
    status, body = await connected.answer()
    assert (status, len(body)) == (200, len(b"/outer ") + connection.MAX_HEAD_BYTES // 5)


@pytest.mark.parametrize("at_once", [True, False])
async def test_disconnect_with_pipelined_requests_is_detected(line: Any, until: Any, at_once: bool) -> None:
    app = Waiting()
    connected = await line(app)
    first, second = (
        b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nx" % path for path in (b"/1", b"/2")
    )
    if at_once:
        connected.writer.write(first + second)
    else:
        connected.writer.write(first)
        await until(lambda: app.paths)
        connected.writer.write(second)
    await until(lambda: connected.server.pipeline)
    connected.writer.close()
    await until(lambda: app.left)
    assert app.left == app.paths == ["/1"]
    assert not connected.server.pipeline
