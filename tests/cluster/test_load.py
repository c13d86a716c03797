"""The load finds what a request can lack: each way to break an answer is counted under its own name."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parent))

from noloss.driver import Driver
from noloss.load import Ask, Failed, Load, ask

STREAM = {"prompt": "x", "stream": True}


def chunk(text: str, finish: str | None = None, tokens: int | None = None) -> bytes:
    body: dict[str, Any] = {"choices": [{"text": text, "finish_reason": finish}]}
    if tokens is not None:
        body["usage"] = {"completion_tokens": tokens}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


GOOD = [chunk("a"), chunk("b", "length", 2), b"data: [DONE]\n\n"]
STREAMS: dict[str, list[bytes]] = {
    "good": GOOD,
    "wrong_text": [chunk("a"), chunk("c", "length", 2), GOOD[2]],
    "wrong_finish": [chunk("a"), chunk("b", "stop", 2), GOOD[2]],
    "wrong_tokens": [chunk("a"), chunk("b", "length", 3), GOOD[2]],
    "no_end": GOOD[:2],
    "no_end-": [chunk("ab", None, 2), GOOD[2]],
    "error_event": [chunk("a"), b'data: {"error": {"message": "lost"}}\n\n', GOOD[2]],
    "after_end": [*GOOD, chunk("c")],
}


class Server:
    """Answers a completion as its path says, in pieces."""

    def __init__(self) -> None:
        self.answers = 0
        self.enough = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.answers += 1
        if self.answers >= 50:
            self.enough.set()
        kind = request.match_info["kind"]
        if kind == "status_503":
            return web.Response(status=503, text="no engine")
        if not (await request.json()).get("stream"):
            choice = {"text": "ab", "finish_reason": "length"}
            return web.json_response({"choices": [choice], "usage": {"completion_tokens": 2}})
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in STREAMS.get(kind, GOOD):
            await response.write(piece)
            if kind == "cut":
                assert request.transport is not None
                request.transport.abort()
                return response
        if kind == "timeout":
            await asyncio.sleep(3600)
        return response


@pytest.fixture
async def server() -> AsyncIterator[tuple[str, Server]]:
    handler = Server()
    app = web.Application()
    app.router.add_post("/{kind}/completions", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", handler
    await runner.cleanup()


async def outcome(url: str, body: dict[str, Any], seconds: float = 60) -> str:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds)) as session:
        try:
            Ask(body, "ab", "length", 2).hold(await ask(session, url, body, "completions"))
        except Failed as error:
            return error.kind
    return "good"


@pytest.mark.parametrize("kind", [*STREAMS, "status_503", "cut"])
async def test_a_stream_is_good_only_when_it_is_whole(server: Any, kind: str) -> None:
    assert await outcome(f"{server[0]}/{kind}", STREAM) == kind.rstrip("-")


async def test_a_whole_answer_is_held_too(server: Any) -> None:
    assert await outcome(f"{server[0]}/good", {"prompt": "x"}) == "good"
    assert await outcome(f"{server[0]}/status_503", {"prompt": "x"}) == "status_503"


async def test_who_does_not_answer_and_who_is_not_there_are_failures(server: Any) -> None:
    assert await outcome(f"{server[0]}/timeout", STREAM, seconds=0.3) == "timeout"
    assert await outcome("http://127.0.0.1:1/v1", STREAM) == "refused"


async def test_nothing_is_tried_again(server: Any) -> None:
    url, handler = server
    await outcome(f"{url}/cut", STREAM)
    await outcome(f"{url}/status_503", STREAM)
    assert handler.answers == 2


async def test_every_request_is_counted_once(server: Any) -> None:
    url, _ = server
    load = Load({"targets": []})
    async with aiohttp.ClientSession() as session:
        for kind in ("good", "good", "cut", "wrong_text", "good"):
            await load._one(session, f"{url}/{kind}", Ask(STREAM, "ab", "length", 2))
    told = load.tally.summary()
    assert (told["started"], told["ok"], told["streams"], told["failed"]) == (5, 3, 3, 2)
    assert told["failures"] == {"cut": 1, "wrong_text": 1}
    assert [one["kind"] for one in load.tally.samples] == ["cut", "wrong_text"]


async def test_a_load_learns_what_must_come_and_ends_with_its_counts(server: Any) -> None:
    url, handler = server
    asks = [{"body": STREAM}, {"body": {"prompt": "x"}}]
    lanes = [{"workers": 2, "asks": asks}]
    driver = Driver({"targets": [{"url": f"{url}/good", "lanes": lanes}]})
    await driver.start()
    try:
        await handler.enough.wait()
        counts = await driver.end()
    finally:
        await driver.kill()
    assert counts["started"] == counts["ok"] == handler.answers - 4
    assert counts["failed"] == 0
