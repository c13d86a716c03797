# SPDX-License-Identifier: Apache-2.0
"""The load generator of `noloss` counts each kind of incomplete or wrong answer under its own name."""

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
from noloss.load import FailedRequest, Load, Question, send_request

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
    """Answers completion requests; the path of a request selects the answer or the fault.

    The event `enough` is set after 50 requests.
    """

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
            Question(body, "ab", "length", 2).check(await send_request(session, url, body, "completions"))
        except FailedRequest as error:
            return error.kind
    return "good"


@pytest.mark.parametrize("kind", [*STREAMS, "status_503", "cut"])
async def test_each_fault_of_a_stream_is_counted_under_its_name(server: Any, kind: str) -> None:
    assert await outcome(f"{server[0]}/{kind}", STREAM) == kind.rstrip("-")


async def test_an_answer_without_streaming_is_checked_too(server: Any) -> None:
    assert await outcome(f"{server[0]}/good", {"prompt": "x"}) == "good"
    assert await outcome(f"{server[0]}/status_503", {"prompt": "x"}) == "status_503"


async def test_timeouts_and_refused_connections_are_failures(server: Any) -> None:
    assert await outcome(f"{server[0]}/timeout", STREAM, seconds=0.3) == "timeout"
    assert await outcome("http://127.0.0.1:1/v1", STREAM) == "refused"


async def test_a_failed_request_is_not_retried(server: Any) -> None:
    url, handler = server
    await outcome(f"{url}/cut", STREAM)
    await outcome(f"{url}/status_503", STREAM)
    assert handler.answers == 2


async def test_every_request_is_counted_once(server: Any) -> None:
    url, _ = server
    load = Load({"targets": []})
    async with aiohttp.ClientSession() as session:
        for kind in ("good", "good", "cut", "wrong_text", "good"):
            await load._send(session, f"{url}/{kind}", Question(STREAM, "ab", "length", 2))
    counts = load.counts.summary()
    assert (counts["started"], counts["ok"], counts["streams"], counts["failed"]) == (5, 3, 3, 2)
    assert counts["failures"] == {"cut": 1, "wrong_text": 1}
    assert [sample["kind"] for sample in load.counts.samples] == ["cut", "wrong_text"]


async def test_a_load_learns_the_expected_answers_and_returns_its_counts(server: Any) -> None:
    url, handler = server
    questions = [{"body": STREAM}, {"body": {"prompt": "x"}}]
    lanes = [{"workers": 2, "questions": questions}]
    driver = Driver({"targets": [{"url": f"{url}/good", "lanes": lanes}]})
    await driver.start()
    try:
        await handler.enough.wait()
        counts = await driver.end()
    finally:
        await driver.kill()
    assert counts["started"] == counts["ok"] == handler.answers - 4
    assert counts["failed"] == 0
