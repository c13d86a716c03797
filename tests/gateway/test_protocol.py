"""Clients that send too much, or too slowly, before their request has begun."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import pytest

from mizzen.gateway import protocol

BODY = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 3}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def connect(gateway: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = gateway.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def test_headers_without_end_are_refused(live: Any, scripted: Any) -> None:
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
async def test_a_head_that_does_not_come_ends_the_connection(
    live: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch, drip: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
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
async def test_a_client_that_takes_nothing_keeps_no_connection(
    live: Any, scripted: Any, until: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Of a stream, and of a whole answer that was written at once and waits for the client alone."""
    monkeypatch.setattr(protocol, "UNTAKEN_SECONDS", 0.3)
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


async def test_slow_bodies_long_streams_and_kept_connections_are_left_alone(
    live: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = scripted()
    engine.does.step_seconds = 0.05
    gateway = await live(engine)
    reader, writer = await connect(gateway)
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)  # heads come at once from here on, however busy we are
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
