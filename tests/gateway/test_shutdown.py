# SPDX-License-Identifier: Apache-2.0
"""Errors of answers that a gateway cannot finish before it shuts down."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

BODY = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 500}


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions", "embeddings"])
async def test_interrupted_unary_answer_is_a_retryable_503(
    live: Any, scripted: Any, until: Any, path: str, begun: bool
) -> None:
    engine = scripted()
    engine.does.fault, engine.does.fault_after = "mute", 2 if begun else 0
    engine.does.step_seconds = 0.01
    gateway = await live(engine)
    body: dict[str, Any] = {"model": "demo", "max_tokens": 500, "prompt": [5, 6, 7]}
    if path == "chat/completions":
        body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    elif path == "embeddings":
        engine._embed = lambda peer, message: engine.requests.append(message)
        body = {"model": "demo", "input": "hi"}
    async with httpx.AsyncClient(timeout=60) as http:
        pending = asyncio.create_task(http.post(f"{gateway.url}/v1/{path}", json=body))
        await until(lambda: engine.requests)
        await asyncio.sleep(0.1)
        await gateway.gateway.close()
        answer = await pending
    error = answer.json()["error"]
    assert answer.status_code == 503, error
    assert "the gateway is shutting down" in error["message"]
    assert error["type"] == "server_error"
    assert int(answer.headers["retry-after"]) >= 1


async def test_interrupted_stream_ends_with_an_error_and_advice(live: Any, scripted: Any, until: Any) -> None:
    engine = scripted()
    engine.does.fault, engine.does.fault_after = "mute", 2
    gateway = await live(engine)
    async with httpx.AsyncClient(timeout=60) as http:
        pending = asyncio.create_task(
            http.post(f"{gateway.url}/v1/completions", json={**BODY, "stream": True})
        )
        await until(lambda: engine.requests and next(iter(gateway.gateway.engines)).requests)
        await asyncio.sleep(0.1)
        await gateway.gateway.close()
        answer = await pending
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert "[DONE]" not in events
    assert json.loads(events[-1])["error"] == {
        "message": "the answer was interrupted: the gateway is shutting down; send the request again",
        "type": "server_error",
        "param": None,
        "code": "engine_lost",
    }
