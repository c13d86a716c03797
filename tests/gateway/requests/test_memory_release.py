# SPDX-License-Identifier: Apache-2.0
"""Requests are freed by reference counting as soon as they end, without the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mizzen.gateway.http import malloc_trim
from mizzen.gateway.http.api_call import ApiCall
from mizzen.wire.messages import RefusalCode

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
TEXT = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 3}
REQUESTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "whole": ("completions", TEXT, 200),
    "stream": ("chat/completions", {**CHAT, "stream": True}, 200),
    "choices": ("chat/completions", {**CHAT, "n": 3}, 200),
    "streamed choices": ("chat/completions", {**CHAT, "n": 3, "stream": True}, 200),
    "vectors": ("embeddings", {"model": "demo", "input": ["a", "b"]}, 200),
    "a wrong field": ("chat/completions", {**CHAT, "top_p": "x"}, 400),
    "a wrong field of a response": ("responses", {"model": "demo", "input": 7}, 400),
    "a wrong block of a message": (
        "messages",
        {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
        400,
    ),
    "an unknown model": ("chat/completions", {**CHAT, "model": "x"}, 404),
    "too long": ("completions", {**TEXT, "prompt": [5] * 5000}, 400),
    "too long for choices": ("completions", {**TEXT, "prompt": [[5] * 5000, [6]], "n": 2}, 400),
    "too long to embed": ("embeddings", {"model": "demo", "input": [[5] * 5000, [6]]}, 400),
    "late": ("completions", {**TEXT, "timeout": 0.001, "max_tokens": 1900}, 504),
}


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Disable the garbage collector, so that objects are freed only by reference counting."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def calls() -> list[Any]:
    return [item for item in gc.get_objects() if issubclass(type(item), ApiCall)]


@pytest.mark.parametrize("name", REQUESTS)
async def test_answered_request_is_freed_without_garbage_collection(
    live: Any, scripted: Any, until: Any, uncollected: None, name: str
) -> None:
    path, body, status = REQUESTS[name]
    gateway = await live(scripted())
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{gateway.url}/v1/{path}", json=body)
        assert answer.status_code == status, answer.text
    await until(lambda: not calls())


@pytest.mark.parametrize("name", ["refused", "broken", "broken choices"])
async def test_failed_request_is_freed_without_garbage_collection(
    live: Any, scripted: Any, until: Any, uncollected: None, name: str
) -> None:
    engine = scripted()
    gateway = await live(engine, max_resumes=0)
    if name == "refused":
        engine.does.refuse = RefusalCode.INVALID
    else:
        engine.does.fault = "error"
    body = {**TEXT, "max_tokens": 50, "stream": name != "refused", "n": 2 if "choices" in name else 1}
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{gateway.url}/v1/completions", json=body)
    assert "error" in answer.text
    await until(lambda: not calls())


async def test_disconnected_request_is_freed_without_garbage_collection(
    live: Any, scripted: Any, until: Any, uncollected: None
) -> None:
    engine = scripted()
    engine.does.step_seconds = 0.01
    gateway = await live(engine)
    host, port = gateway.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({**TEXT, "max_tokens": 1900, "stream": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await until(lambda: engine.running)
    writer.transport.abort()
    await until(lambda: not engine.running)
    await until(lambda: not calls())


@pytest.mark.parametrize(("size", "trims"), [(10_000, 0), (200_000, 1)])
async def test_memory_of_large_bodies_is_trimmed_after_they_end(
    live: Any, scripted: Any, until: Any, monkeypatch: pytest.MonkeyPatch, size: int, trims: int
) -> None:
    monkeypatch.setattr(malloc_trim, "TRIM_SECONDS", 0.3)
    gateway = await live(scripted())
    done: list[float] = []
    gateway.gateway.trimmer._trim = lambda: done.append(time.monotonic())
    body = {**CHAT, "metadata": {"note": "x" * size}}
    async with httpx.AsyncClient(timeout=60) as http:
        for _ in range(3):
            assert (await http.post(f"{gateway.url}/v1/chat/completions", json=body)).status_code == 200
        await until(lambda: len(done) >= trims)
        await asyncio.sleep(0.5)
    assert trims <= len(done) <= 3 * trims
    assert gateway.gateway.body_budget.used == 0


def test_trim_returns_freed_memory_to_the_system() -> None:
    """glibc alone would keep the freed memory (0.2 GB in small pieces), because a used block follows it."""
    script = """
from mizzen.gateway.http.malloc_trim import trim_heap
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
kept = [bytes(2000) for _ in range(100_000)]
last = bytes(2000)
before = resident()
kept = None
trim_heap()
assert before - resident() > 100_000_000, (before, resident())
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
