# SPDX-License-Identifier: Apache-2.0
"""Requests to upgrade to another protocol, and tunnels."""

from __future__ import annotations

from typing import Any

import pytest

from http_apps import Echoing

SMUGGLED = b"POST /smuggled HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


PLAIN = b"GET /plain HTTP/1.1\r\nhost: x\r\n\r\n"


def upgrading(path: bytes = b"/outer", upgrade: bytes = b"h2c", chunked: bool = False) -> tuple[bytes, bytes]:
    """Return head and body of a request to upgrade, as Java's HttpClient sends it for h2c."""
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
async def test_upgrade_requests_are_served_as_http_1_1(
    line: Any, pieces: str, chunked: bool, upgrade: bytes
) -> None:
    app = Echoing()
    connected = await line(app)
    for _ in range(2):
        connected.feed(*PIECES[pieces](*upgrading(upgrade=upgrade, chunked=chunked)))
        assert await connected.answer() == (200, b"/outer " + SMUGGLED)
        connected.feed(PLAIN)
        assert await connected.answer() == (200, b"/plain ")
    assert app.paths == ["/outer", "/plain"] * 2
    names = [name for name, _ in app.scopes[0]["headers"]]
    assert b"upgrade" not in names
    assert {b"connection", b"host", b"http2-settings", b"x-empty"} < set(names)


async def test_pipelined_upgrade_requests_are_served_in_order(line: Any) -> None:
    app = Echoing()
    connected = await line(app)
    requests = [PLAIN, *(b"".join(upgrading(b"/%d" % i, chunked=i > 1)) for i in range(4)), PLAIN]
    connected.feed(b"".join(requests))
    for path in ("/plain", "/0", "/1", "/2", "/3", "/plain"):
        body = b"" if path == "/plain" else SMUGGLED
        assert await connected.answer() == (200, path.encode() + b" " + body)


async def test_upgrade_request_with_connection_close_closes_the_connection(line: Any) -> None:
    connected = await line(Echoing())
    head, body = upgrading()
    connected.feed(head.replace(b"Upgrade, ", b"close, Upgrade, ") + body + PLAIN)
    assert await connected.answer() == (200, b"/outer " + SMUGGLED)
    assert await connected.ended() == b""


async def test_head_with_an_upgrade_has_the_same_bound(line: Any) -> None:
    connected = await line(Echoing())
    head, _ = upgrading()
    connected.feed(head[:-2], *[b"x: %b\r\n" % (b"a" * 8000)] * 9)
    assert (await connected.ended()).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("target", [b"x:1", b"/x"])
async def test_connect_is_rejected_with_all_bytes_after_it(line: Any, target: bytes) -> None:
    app = Echoing()
    connected = await line(app)
    connected.feed(b"CONNECT %b HTTP/1.1\r\nhost: x\r\n\r\n" % target + SMUGGLED, SMUGGLED)
    assert (await connected.ended()).startswith(b"HTTP/1.1 400 ")
    assert app.paths == []
