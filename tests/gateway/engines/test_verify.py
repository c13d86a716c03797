# SPDX-License-Identifier: Apache-2.0
"""Golden prompts at the gateway: an engine that awaits verification gets no other prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mizzen.gateway.engines.discovered_engine import DiscoveredEngine
from mizzen.gateway.engines.verify_request import verify_timeout
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.wire.messages import RefusalCode

QUESTION: dict[str, Any] = {"service": "demo", "uid": "pod-1", "prompt": "Mizzen serves", "maxTokens": 3}


class UnverifiedEngine:
    """A gateway with one engine that awaits verification."""

    def __init__(self, gateway: Any, engine: Any) -> None:
        self.gateway, self.engine, self.table = gateway, engine, gateway.gateway.only_service.table
        self.discovered = DiscoveredEngine(
            name="one", uid="pod-1", endpoint=engine.endpoint, awaiting_verification=True
        )

    @property
    def state(self) -> str:
        return next((engine.state for engine in self.table if engine.discovered.uid == "pod-1"), "")

    def release(self) -> None:
        self.table.sync([replace(self.discovered, awaiting_verification=False)])

    async def post(self, token: str = "secret", seconds: float = 30, **fields: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"}
        body = {**QUESTION, "timeoutSeconds": seconds, **fields}
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            return await http.post(f"{self.gateway.admin}/admin/verify", json=body, headers=headers)


@pytest.fixture
async def unverified(live: Any, scripted: Any, until: Any, tmp_path: Path) -> AsyncIterator[UnverifiedEngine]:
    token = tmp_path / "admin.token"
    token.write_text("secret")
    engine = scripted()
    gateway = await live(
        engine, admin_token_file=str(token), queue_timeout_seconds=60.0, wait=False, service="demo"
    )
    unverified_engine = UnverifiedEngine(gateway, engine)
    unverified_engine.table.sync([unverified_engine.discovered])
    await until(lambda: unverified_engine.state == "verifying")
    yield unverified_engine


async def test_unverified_engine_only_answers_golden_prompts(
    unverified: UnverifiedEngine, until: Any, tokenizer_files: dict[str, bytes]
) -> None:
    waiting = asyncio.create_task(
        unverified.gateway.client(timeout=60).completions.create(model="demo", prompt="real", max_tokens=3)
    )
    await until(lambda: unverified.gateway.gateway.only_service.waiting_requests == 1)
    answer = (await unverified.post()).json()
    tokenizer = Tokenizer.from_files(tokenizer_files)
    assert answer["text"] == tokenizer.decode([10, 11, 12])
    assert (answer["finish"], answer["outputTokens"]) == ("length", 3)
    [request] = unverified.engine.requests
    assert request.prompt == b"".join(
        token.to_bytes(4, "little") for token in tokenizer.encode("Mizzen serves")
    )
    assert request.sampling.temperature == 0
    assert not waiting.done()
    unverified.release()
    assert (await waiting).choices[0].text == answer["text"]
    assert unverified.state == "serving"
    refused = await unverified.post()
    assert refused.status_code == 409
    assert "one is serving" in refused.text


async def test_routing_table_shows_an_engine_as_verifying(unverified: UnverifiedEngine) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        answer = await http.get(
            f"{unverified.gateway.admin}/admin/engines", headers={"authorization": "Bearer secret"}
        )
        metrics = await http.get(f"{unverified.gateway.admin}/metrics")
    assert [(engine["uid"], engine["state"]) for engine in answer.json()["engines"]] == [
        ("pod-1", "verifying")
    ]
    assert 'mizzen_gateway_engines{state="verifying"} 1.0' in metrics.text


async def test_end_token_is_not_part_of_the_text(
    unverified: UnverifiedEngine, tokenizer_files: dict[str, bytes]
) -> None:
    unverified.engine.does.reply = [10, 11, 2]
    unverified.engine.does.end = 2
    answer = (await unverified.post(maxTokens=10)).json()
    assert answer["text"] == Tokenizer.from_files(tokenizer_files).decode([10, 11])
    assert answer["finish"] == "stop"


@pytest.mark.parametrize(
    ("token", "fields", "status", "words"),
    [
        ("wrong", {}, 401, "bearer token"),
        ("secret", {"uid": "pod-2"}, 404, "pod-2"),
        ("secret", {"service": "other"}, 404, "other has no engine"),
        ("secret", {"prompt": ""}, 400, "prompt"),
        ("secret", {"maxTokens": 0}, 400, "maxTokens"),
        ("secret", {"timeoutSeconds": 1e9}, 400, "timeoutSeconds"),
        ("secret", {"more": 1}, 400, "more"),
    ],
)
async def test_invalid_golden_prompts_are_rejected(
    unverified: UnverifiedEngine, token: str, fields: dict[str, Any], status: int, words: str
) -> None:
    answer = await unverified.post(token, **fields)
    assert answer.status_code == status, answer.text
    assert words in answer.text
    assert not unverified.engine.requests


@pytest.mark.parametrize(
    ("refusal", "status"), [(RefusalCode.INVALID, 400), (RefusalCode.QUEUE_FULL, 503), (None, 504)]
)
async def test_unanswered_golden_prompt_reports_its_reason(
    unverified: UnverifiedEngine, refusal: RefusalCode | None, status: int
) -> None:
    if refusal is not None:
        unverified.engine.does.refuse = refusal
        answer = await unverified.post()
    else:
        unverified.engine.does.step_seconds, unverified.engine.does.fault = 0.01, "silent"
        answer = await unverified.post(seconds=0.3)
    assert answer.status_code == status, answer.text


async def test_abandoned_golden_prompt_is_retryable(unverified: UnverifiedEngine) -> None:
    unverified.engine.does.fault = "error"
    answer = await unverified.post(maxTokens=10)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_requests_only_go_to_verified_engines(
    unverified: UnverifiedEngine, scripted: Any, until: Any
) -> None:
    other = scripted()
    unverified.table.sync(
        [unverified.discovered, DiscoveredEngine(name="two", uid="pod-2", endpoint=other.endpoint)]
    )
    await until(lambda: unverified.table.serving)
    client: openai.AsyncOpenAI = unverified.gateway.client(timeout=60)
    for _ in range(20):
        await client.completions.create(model="demo", prompt="real", max_tokens=1)
    assert (len(other.requests), len(unverified.engine.requests)) == (20, 0)


def test_verify_timeout_of_request_bodies() -> None:
    assert verify_timeout(b'{"service":"a","uid":"b","prompt":"c","maxTokens":1,"timeoutSeconds":7}') == 7
    assert verify_timeout(b"[") == 0
