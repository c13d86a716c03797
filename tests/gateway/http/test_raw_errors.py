# SPDX-License-Identifier: Apache-2.0
"""Errors that the server answers without calling the application, and HTTP/1.0 clients."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

BODY = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 3}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"

REFUSED: dict[str, tuple[bytes, int]] = {
    "no HTTP": (b"\x16\x03\x01\x02\0\x01\r\n\r\n", 400),
    "length and chunks": (HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "two lengths": (HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", 400),
    "a bad chunk": (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", 400),
    "a tunnel": (b"CONNECT evil:443 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a long head": (HEAD + b"x: %s\r\n" % (b"a" * 80_000), 431),
}


async def raw(gateway: Any, data: bytes) -> tuple[bytes, bytes]:
    """Send bytes; return head and body of everything received until the connection ends."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize("name", REFUSED)
async def test_invalid_http_gets_an_error_in_openais_shape(live: Any, scripted: Any, name: str) -> None:
    data, status = REFUSED[name]
    head, rest = await raw(await live(scripted()), data)
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"content-type: application/json" in head.lower()
    assert b"content-length: %d" % len(rest) in head.lower()
    error = json.loads(rest)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_response_is_not_mixed_with_an_error_for_later_bytes(
    live: Any, scripted: Any, until: Any, stream: bool
) -> None:
    """Invalid bytes arrive while a request is being answered, before or after its response has begun."""
    engine = scripted()
    engine.does.step_seconds = 0.05
    gateway = await live(engine)
    body = json.dumps({**BODY, "stream": stream, "max_tokens": 200}).encode()
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    if stream:
        await reader.readuntil(b"data: ")
    else:
        await until(lambda: engine.running)
    writer.write(b"\0\0 no request\r\n\r\n")
    assert b"HTTP/1.1 400" not in await asyncio.wait_for(reader.read(), 60)
    writer.close()
    await until(lambda: not gateway.gateway.in_flight)


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_clients_get_no_chunked_encoding(live: Any, scripted: Any, stream: bool) -> None:
    gateway = await live(scripted())
    body = json.dumps({**BODY, "stream": stream}).encode()
    head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"connection: keep-alive\r\n"
    response_head, rest = await raw(gateway, head + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert b" 200 " in response_head.split(b"\r\n")[0]
    assert b"transfer-encoding" not in response_head.lower()
    assert b"connection: close" in response_head.lower()
    if stream:
        events = rest.split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        assert all(json.loads(event.removeprefix(b"data: ")) for event in events[:-2])
    else:
        assert len(json.loads(rest)["choices"]) == 1
        assert b"content-length: %d" % len(rest) in response_head.lower()


async def test_trailing_slash_is_ignored(live: Any, scripted: Any) -> None:
    """The server does not redirect to the path without the slash.

    After a redirect, a client may omit the body, or the API key if the redirect names another host.
    """
    gateway = await live(scripted())
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{gateway.url}/v1/completions/", json=BODY)
        assert answer.status_code == 200, answer.text
        models = await http.get(f"{gateway.url}/v1/models/")
        assert [model["id"] for model in models.json()["data"]] == ["demo"]
        missing = await http.post(f"{gateway.url}/v1/nothing/", json=BODY)
        assert missing.status_code == 404
        assert missing.json()["error"]["message"]
        counted = (await http.get(f"{gateway.admin}/metrics")).text
    assert 'path="/v1/completions"' in counted
