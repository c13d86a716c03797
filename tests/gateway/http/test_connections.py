"""Clients that send too much, too slowly, another protocol's wishes or the next request, or that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from mizzen.gateway.http import connection

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
async def test_a_client_that_takes_nothing_keeps_no_connection(
    live: Any, scripted: Any, until: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Of a stream, and of a whole answer that was written at once and waits for the client alone."""
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


async def test_slow_bodies_long_streams_and_kept_connections_are_left_alone(
    live: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = scripted()
    engine.does.step_seconds = 0.05
    gateway = await live(engine)
    reader, writer = await connect(gateway)
    monkeypatch.setattr(
        connection, "HEAD_TIMEOUT_SECONDS", 0.3
    )  # heads come at once from here on, however busy we are
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


class Line:
    """One connection to an app: a client's end, and the server's, which takes pieces as they are given."""

    def __init__(self, reader: Any, writer: Any, server: connection.BoundedProtocol) -> None:
        self.reader, self.writer, self.server = reader, writer, server

    def give(self, *pieces: bytes) -> None:
        """Have the server receive these pieces, each alone."""
        for piece in pieces:
            self.server.data_received(piece)

    async def answer(self) -> tuple[int, bytes]:
        """Read a response with a length."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 60)
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return int(head.split()[1]), await asyncio.wait_for(self.reader.readexactly(size), 60)

    async def ended(self) -> bytes:
        """Read what comes until the server has ended the connection."""
        return await asyncio.wait_for(self.reader.read(), 60)


@pytest.fixture
async def line() -> AsyncIterator[Callable[..., Any]]:
    """Return a function that opens a connection to an ASGI app."""
    async with contextlib.AsyncExitStack() as stack:

        async def opened(app: Any) -> Line:
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
            return Line(reader, writer, next(iter(state.connections)))  # type: ignore[arg-type]

        yield opened


class Echoing:
    """An app that answers with the path and the body of a request."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []

    @property
    def paths(self) -> list[str]:
        return [scope["path"] for scope in self.scopes]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        await answer(send, 200, scope["path"].encode() + b" " + body)


class Refusing(Echoing):
    """An app that answers 401 and reads no body."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        await answer(send, 401, b"")


async def answer(send: Any, status: int, body: bytes) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


CHUNKED = b"POST /outer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


AROUND = {"trailers": (b"0\r\n", b"a:b\r\n"), "trailer": (b"0\r\na:", b"b"), "size": (b"1;", b"a")}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("refused", [False, True])
async def test_what_is_no_body_has_a_bound_also_behind_the_head(
    line: Any, around: str, refused: bool
) -> None:
    one = await line(Refusing() if refused else Echoing())
    one.give(CHUNKED + b"5\r\nhello\r\n")
    if refused:
        assert await one.answer() == (401, b"")
    begin, more = AROUND[around]
    one.give(begin, *[more * (16384 // len(more))] * 64)
    assert one.server.transport.is_closing()
    assert len(one.server.headers) == 2
    assert await one.ended() == b""


async def test_trailers_are_read_and_dropped(line: Any) -> None:
    app = Echoing()
    one = await line(app)
    for sent in (CHUNKED + b"5\r\nhello\r\n0\r\nx-sum: 1\r\nexpect: 100-continue\r\n\r\n",) * 2:
        one.give(*(sent[at : at + 1] for at in range(len(sent))))
        assert await one.answer() == (200, b"/outer hello")
    assert [[name for name, _ in scope["headers"]] for scope in app.scopes] == [
        [b"host", b"transfer-encoding"]
    ] * 2


async def test_a_body_of_many_small_chunks_is_no_head(line: Any) -> None:
    one = await line(Echoing())
    one.give(CHUNKED, *[b"1;a=b\r\nx\r\n" for _ in range(connection.MAX_HEAD_BYTES // 5)], b"0\r\n\r\n")
    status, body = await one.answer()
    assert (status, len(body)) == (200, len(b"/outer ") + connection.MAX_HEAD_BYTES // 5)


SMUGGLED = b"POST /smuggled HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
PLAIN = b"GET /plain HTTP/1.1\r\nhost: x\r\n\r\n"


def upgrading(path: bytes = b"/outer", upgrade: bytes = b"h2c", chunked: bool = False) -> tuple[bytes, bytes]:
    """Return head and body of a request that asks for another protocol, as Java's HttpClient does for h2c."""
    head = (
        b"POST %b HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nHost: x\r\nHTTP2-Settings: AAEAAEAA\r\n"
        b"Upgrade: %b\r\nX-Empty:\r\n"
    ) % (path, upgrade)
    if chunked:
        body = b"%x\r\n%b\r\n0\r\nx-sum: 1\r\n\r\n" % (len(SMUGGLED), SMUGGLED)
        return head + b"Transfer-Encoding: chunked\r\n\r\n", body
    return head + b"Content-Length: %d\r\n\r\n" % len(SMUGGLED), SMUGGLED


PIECES = {
    "one": lambda head, body: [head + body],
    "two": lambda head, body: [head, body],
    "split-head": lambda head, body: [head[:-1], head[-1:] + body[:7], body[7:]],
    "bytes": lambda head, body: [b"%c" % byte for byte in head + body],
}


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
async def test_a_wish_for_another_protocol_changes_nothing(
    line: Any, pieces: str, chunked: bool, upgrade: bytes
) -> None:
    app = Echoing()
    one = await line(app)
    for _ in range(2):
        one.give(*PIECES[pieces](*upgrading(upgrade=upgrade, chunked=chunked)))
        assert await one.answer() == (200, b"/outer " + SMUGGLED)
        one.give(PLAIN)
        assert await one.answer() == (200, b"/plain ")
    assert app.paths == ["/outer", "/plain"] * 2
    names = [name for name, _ in app.scopes[0]["headers"]]
    assert b"upgrade" not in names
    assert {b"connection", b"host", b"http2-settings", b"x-empty"} < set(names)


async def test_wishes_for_other_protocols_among_pipelined_requests(line: Any) -> None:
    app = Echoing()
    one = await line(app)
    requests = [PLAIN, *(b"".join(upgrading(b"/%d" % i, chunked=i > 1)) for i in range(4)), PLAIN]
    one.give(b"".join(requests))
    for path in ("/plain", "/0", "/1", "/2", "/3", "/plain"):
        body = b"" if path == "/plain" else SMUGGLED
        assert await one.answer() == (200, path.encode() + b" " + body)


async def test_a_wish_for_another_protocol_keeps_what_ends_a_connection(line: Any) -> None:
    one = await line(Echoing())
    head, body = upgrading()
    one.give(head.replace(b"Upgrade, ", b"close, Upgrade, ") + body + PLAIN)
    assert await one.answer() == (200, b"/outer " + SMUGGLED)
    assert await one.ended() == b""


async def test_a_head_that_wishes_for_another_protocol_has_the_same_bound(line: Any) -> None:
    one = await line(Echoing())
    head, _ = upgrading()
    one.give(head[:-2], *[b"x: %b\r\n" % (b"a" * 8000)] * 9)
    assert (await one.ended()).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("target", [b"x:1", b"/x"])
async def test_a_tunnel_is_refused_with_what_comes_through_it(line: Any, target: bytes) -> None:
    app = Echoing()
    one = await line(app)
    one.give(b"CONNECT %b HTTP/1.1\r\nhost: x\r\n\r\n" % target + SMUGGLED, SMUGGLED)
    assert (await one.ended()).startswith(b"HTTP/1.1 400 ")
    assert app.paths == []


class Waiting(Echoing):
    """An app that reads a body and then waits until the client has left."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.append(scope["path"])


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_client_that_leaves_with_requests_in_line_is_missed(
    line: Any, until: Any, at_once: bool
) -> None:
    app = Waiting()
    one = await line(app)
    first, second = (
        b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nx" % path for path in (b"/1", b"/2")
    )
    if at_once:
        one.writer.write(first + second)
    else:
        one.writer.write(first)
        await until(lambda: app.paths)
        one.writer.write(second)
    await until(lambda: one.server.pipeline)
    one.writer.close()
    await until(lambda: app.left)
    assert app.left == app.paths == ["/1"]
    assert not one.server.pipeline


class Slow(Echoing):
    """An app that begins its answers, and ends them when it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.end = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"be", "more_body": True})
        await self.end.wait()
        await send({"type": "http.response.body", "body": b"gin"[1:]})


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
    (one.server._leave if ends else one.server.timeout_keep_alive_handler)()
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
    (one.server._leave if ends else one.server.timeout_keep_alive_handler)()
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
        one.server.hurry()
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
