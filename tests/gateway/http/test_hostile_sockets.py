# SPDX-License-Identifier: Apache-2.0
"""Hostile sockets on either side: garbage instead of HTTP, garbage frames, clients that do not read."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
from typing import Any

import httpx
import numpy as np
import pytest

from mizzen.gateway.http import connection
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.wire.codec import encode
from mizzen.wire.messages import (
    Blocks,
    Embedding,
    File,
    Finish,
    Logprobs,
    Outputs,
    Refused,
    WireMessage,
)

BODY = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"

GARBAGE: dict[str, bytes] = {
    "noise": bytes(range(256)) * 8,
    "zeros": b"\0" * 4096,
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x5a" * 500,
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
    "http 0.9": b"GET /\r\n\r\n",
    "no version": b"POST /v1/chat/completions\r\n\r\n",
    "an unknown method": b"BREW /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n",
    "a header without colon": HEAD + b"nonsense\r\n\r\n",
    "a header with NUL": HEAD + b"x: a\0b\r\n\r\n",
    "folded header": HEAD + b"x: a\r\n b\r\n\r\n",
    "negative length": HEAD + b"content-length: -1\r\n\r\n",
    "length of letters": HEAD + b"content-length: ten\r\n\r\n",
    "endless length": HEAD + b"content-length: 99999999999999999999\r\n\r\n",
    "two lengths": HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "length and chunks": HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad chunk size": HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "huge chunk size": HEAD + b"transfer-encoding: chunked\r\n\r\nffffffffffffffff1\r\n{}",
    "unknown coding": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "path of bytes": b"GET /\xff\xfe%00%ff HTTP/1.1\r\nhost: x\r\n\r\n",
    "no path": b"GET  HTTP/1.1\r\nhost: x\r\n\r\n",
    "a proxy's request": b"CONNECT evil:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    "an upgrade": HEAD + b"connection: upgrade\r\nupgrade: websocket\r\ncontent-length: 0\r\n\r\n",
    "many at once": (HEAD + b"content-length: 0\r\n\r\n") * 200,
}


async def exchange(url: str, data: bytes, half_close: bool) -> bytes:
    """Send bytes to a gateway; return all bytes that it sends until it closes the connection or is silent."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    received = b""
    try:
        writer.write(data)
        await writer.drain()
        if half_close:
            writer.write_eof()
        async with asyncio.timeout(0.2 if not half_close else 30):
            while piece := await reader.read(65536):
                received += piece
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
    return received


async def still_serves(gateway: Any) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{gateway.url}/v1/chat/completions", json=BODY)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("half_close", [False, True], ids=["open socket", "half-closed socket"])
async def test_garbage_instead_of_http_gets_an_error_or_a_close(
    half_close: bool, scripted: Any, live: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await live(scripted())
    gc.collect()  # otherwise clients left by earlier tests log their closed loop during this test
    await asyncio.sleep(0.1)
    caplog.clear()
    for name, data in GARBAGE.items():
        answer = await exchange(gateway.url, data, half_close)
        for line in answer.split(b"\r\n"):
            if line.startswith(b"HTTP/1.1 "):
                assert line[9:10] == b"4", f"{name}: {line!r}"
    await still_serves(gateway)
    assert not [record for record in caplog.records if record.exc_info], "an error was not expected"


async def test_many_unfinished_heads_do_not_block_other_clients(scripted: Any, live: Any) -> None:
    gateway = await live(scripted())
    host, port = gateway.url.removeprefix("http://").split(":")
    connections = [await asyncio.open_connection(host, int(port)) for _ in range(200)]
    for number, (_, writer) in enumerate(connections):
        writer.write(HEAD + (b"content-length: 100\r\n\r\n{" if number % 2 else b"x: "))
    await still_serves(gateway)
    for _, writer in connections:
        writer.close()
    await still_serves(gateway)


async def test_slow_client_gets_every_byte(
    scripted: Any, live: Any, until: Any, monkeypatch: pytest.MonkeyPatch, model_folder: Any
) -> None:
    """If a request's sequences produce more data than the connection can buffer, all sequences wait.

    Their texts and tokens are not mixed.
    """
    refused = 0
    write = connection.ConnectionWriter.write

    def counting(output: connection.ConnectionWriter, data: bytes) -> bool:
        nonlocal refused
        written = write(output, data)
        refused += not written
        return written

    monkeypatch.setattr(connection.ConnectionWriter, "write", counting)
    engine = scripted(context_length=10_000, max_running_requests=64)
    engine.does.reply = Tokenizer.load(model_folder).encode("A mast holds the sails. Maße 世界 🙂 ", False)
    engine.does.step_seconds = 0.0005
    gateway = await live(engine)
    gateway._sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    body = json.dumps({**BODY, "stream": True, "n": 8, "max_tokens": 800, "return_token_ids": True}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        host, port = gateway.url.removeprefix("http://").split(":")
        client.connect((host, int(port)))
        client.sendall(HEAD + f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        await until(lambda: refused, 60)
        client.setblocking(False)
        received = bytearray()
        while piece := await asyncio.get_running_loop().sock_recv(client, 1 << 20):
            received += piece
    texts, ids, ends = read_events(bytes(received))
    unhindered = (engine.does.reply * 800)[:800]
    expected = Tokenizer.load(model_folder).decode(unhindered)
    assert set(texts) == set(range(8))
    for index in range(8):
        assert ids[index] == unhindered
        assert texts[index] == expected
    assert ends == dict.fromkeys(range(8), "length")


def read_events(raw: bytes) -> tuple[dict[int, str], dict[int, list[int]], dict[int, str]]:
    """Check the framing of a chunked response; return texts, token ids and finish reasons by choice."""
    _, _, remainder = raw.partition(b"\r\n\r\n")
    parts, at, count = [], 0, -1
    while count:
        line = remainder.index(b"\r\n", at)
        count = int(remainder[at:line], 16)
        parts.append(remainder[line + 2 : line + 2 + count])
        at = line + 4 + count
        assert remainder[at - 2 : at] == b"\r\n"
    assert at == len(remainder)
    events = b"".join(parts).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    texts: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    ends: dict[int, str] = {}
    for event in events[:-2]:
        (choice,) = json.loads(event.removeprefix("data: "))["choices"]
        index = choice["index"]
        texts[index] = texts.get(index, "") + choice["delta"].get("content", "")
        ids.setdefault(index, []).extend(choice.get("token_ids") or [])
        if choice["finish_reason"]:
            ends[index] = choice["finish_reason"]
    return texts, ids, ends


def packed(form: str, *values: int) -> bytes:
    return np.array(values, dtype=form).tobytes()


ONE = packed("<u4", 1)
FRAMES: dict[str, bytes | WireMessage] = {
    "nothing": b"",
    "noise": bytes(range(256)),
    "an endless array": b"\xdd\xff\xff\xff\xff",
    "deep": b"\x91" * 100_000,
    "another's message": encode(Refused(None, 1, "x")).replace(b"Refused", b"Refunds"),
    "columns cut": Outputs(1, b"\1\2\3", b"", b"", b""),
    "columns that differ": Outputs(1, ONE, b"", packed("<i4", 5), b""),
    "counts beyond tokens": Outputs(1, ONE, packed("<u4", 0), packed("<i4", 5), packed("<u2", 9)),
    "rows of no request": Outputs(1, packed("<u4", 7), packed("<u4", 0), packed("<i4", 5), b""),
    "an end of no request": Outputs(1, b"", b"", b"", b"", (Finish(7, 99, -1, -1, -1, -1, "x" * 100_000),)),
    "log probabilities of no request": Outputs(1, b"", b"", b"", b"", (), (Logprobs(7, 0, b"abc", b""),)),
    "blocks cut": Blocks(1, b"123", b""),
    "blocks from the future": Blocks(2**60, b"", b""),
    "a file unasked": File("tokenizer.json", -1, 2**60, b"x"),
    "an embedding unasked": Embedding(7, b"xyz", 1, 1),
    "a refusal of no request": Refused(7, 12345, "\0" * 1000, float("nan")),
}


@pytest.mark.parametrize("name", FRAMES)
async def test_garbage_from_an_engine_only_affects_that_engine(
    name: str, scripted: Any, live: Any, until: Any
) -> None:
    """The engine sends the garbage after every Hello, so a link that reconnects gets it again."""
    good = scripted()
    engines = sys.modules["mizzen_gateway_test_engines"]
    frame, frames_sent = FRAMES[name], 0

    class Rogue(engines.ScriptedEngine):
        def _take(self, peer: bytes, message: WireMessage) -> None:
            nonlocal frames_sent
            super()._take(peer, message)
            if type(message).__name__ == "Hello":
                self._send(peer, frame)
                frames_sent += 1

    with Rogue(good.files) as rogue:
        gateway = await live(good, rogue, wait=False)
        await until(lambda: frames_sent and sum(engine.serving for engine in gateway.gateway.table), 60)
        for _ in range(5):
            await still_serves(gateway)
        assert not gateway.gateway.not_ready_reason


async def test_gateway_starts_among_incompatible_engines_and_reports_them(live: Any, until: Any) -> None:
    """The listeners are not engines: one answers in HTTP, and the other closes each connection at once."""

    async def noisy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    servers = [await asyncio.start_server(handler, "127.0.0.1", 0) for handler in (noisy, closing)]
    endpoints = [f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    gateway = await live(*endpoints, wait=False, queue_timeout_seconds=0.0, engine_timeout_seconds=0.5)
    await until(lambda: all(engine.problem for engine in gateway.gateway.table), 60)
    async with httpx.AsyncClient(timeout=60) as http:
        assert (await http.post(f"{gateway.url}/v1/chat/completions", json=BODY)).status_code == 503
    for server in servers:
        server.close()
