# SPDX-License-Identifier: Apache-2.0
"""Prompts that exceed the context length are rejected early; at most two huge texts are tokenized at once."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import httpx
import pytest

from mizzen.gateway.text.model import HUGE_CHARACTERS, MAX_CONCURRENT_HUGE, build_text_model
from mizzen.gateway.text.tokenizer import Tokenizer


async def test_request_beyond_the_context_is_refused_at_once(live: Any, scripted: Any, until: Any) -> None:
    """A request whose max_tokens is too large is refused while other requests still run."""
    engine = scripted(context_length=4096)
    engine.does.fault, engine.does.fault_after = "mute", 1
    gateway = await live(engine, max_tokens_in_flight=16_384)
    async with httpx.AsyncClient(timeout=60) as http:
        url = f"{gateway.url}/v1/completions"
        body = {"model": "demo", "prompt": "a", "max_tokens": 100}
        first = asyncio.create_task(http.post(url, json=body))
        await until(lambda: gateway.gateway.in_flight == 1)
        answer = await http.post(url, json={**body, "max_tokens": 10**9})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert not first.done()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


@pytest.mark.parametrize("kind", ["chat/completions", "completions", "embeddings"])
async def test_prompt_beyond_every_context_is_not_tokenized(
    live: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Tokenization takes hundreds of bytes per token, so a few very long prompts would exhaust memory."""
    gateway, encode = await live(scripted(context_length=2048)), Tokenizer.encode

    def encoded(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        assert len(text) < 100_000
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", encoded)
    text = "hello " * 500_000
    bodies = {
        "chat/completions": {"messages": [{"role": "user", "content": text}]},
        "completions": {"prompt": ["a", text]},
        "embeddings": {"input": text},
    }
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{gateway.url}/v1/{kind}", json={"model": "demo", **bodies[kind]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), error
    assert "the context length is 2048 tokens, but the prompt has at least " in error["message"]
    assert error["param"] == next(iter(bodies[kind]))


async def test_at_most_two_huge_texts_are_tokenized_at_once(
    tokenizer_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def encoded(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", encoded)
    text = build_text_model("demo", tokenizer_files)
    await asyncio.gather(*(text.text_prompt("a" * (HUGE_CHARACTERS + 1)) for _ in range(8)))
    assert most == MAX_CONCURRENT_HUGE
    await asyncio.gather(*(text.text_prompt("a" * HUGE_CHARACTERS) for _ in range(8)))
    assert most > MAX_CONCURRENT_HUGE
