"""Golden prompts at the gateway: an engine that is held back gets them and nothing else."""

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


class ResponseBudget:
    """A gateway with one engine, which is held back."""

    def __init__(self, gateway: Any, engine: Any) -> None:
        self.gateway, self.engine, self.table = gateway, engine, gateway.gateway.only_service.table
        self.found = DiscoveredEngine(
            name="one", uid="pod-1", endpoint=engine.endpoint, awaiting_verification=True
        )

    @property
    def state(self) -> str:
        return next((one.state for one in self.table if one.discovered.uid == "pod-1"), "")

    def release(self) -> None:
        self.table.sync([replace(self.found, awaiting_verification=False)])

    async def post(self, token: str = "secret", seconds: float = 30, **fields: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"}
        body = {**QUESTION, "timeoutSeconds": seconds, **fields}
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            return await http.post(f"{self.gateway.admin}/admin/verify", json=body, headers=headers)


@pytest.fixture
async def held(live: Any, scripted: Any, until: Any, tmp_path: Path) -> AsyncIterator[ResponseBudget]:
    token = tmp_path / "admin.token"
    token.write_text("secret")
    engine = scripted()
    gateway = await live(
        engine, admin_token_file=str(token), queue_timeout_seconds=60.0, wait=False, service="demo"
    )
    it = ResponseBudget(gateway, engine)
    it.table.sync([it.found])
    await until(lambda: it.state == "verifying")
    yield it


async def test_it_answers_golden_prompts_and_gets_no_request_until_it_is_released(
    held: ResponseBudget, until: Any, tokenizer_files: dict[str, bytes]
) -> None:
    waiting = asyncio.create_task(
        held.gateway.client(timeout=60).completions.create(model="demo", prompt="real", max_tokens=3)
    )
    await until(lambda: held.gateway.gateway.only_service.waiting_requests == 1)
    answer = (await held.post()).json()
    tokenizer = Tokenizer.from_files(tokenizer_files)
    assert answer["text"] == tokenizer.decode([10, 11, 12])
    assert (answer["finish"], answer["outputTokens"]) == ("length", 3)
    [asked] = held.engine.requests
    assert asked.prompt == b"".join(one.to_bytes(4, "little") for one in tokenizer.encode("Mizzen serves"))
    assert asked.sampling.temperature == 0
    assert not waiting.done()
    held.release()
    assert (await waiting).choices[0].text == answer["text"]
    assert held.state == "serving"
    refused = await held.post()
    assert refused.status_code == 409
    assert "one is serving" in refused.text


async def test_the_table_says_that_it_is_being_verified(held: ResponseBudget) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        answer = await http.get(
            f"{held.gateway.admin}/admin/engines", headers={"authorization": "Bearer secret"}
        )
        metrics = await http.get(f"{held.gateway.admin}/metrics")
    assert [(one["uid"], one["state"]) for one in answer.json()["engines"]] == [("pod-1", "verifying")]
    assert 'mizzen_gateway_engines{state="verifying"} 1.0' in metrics.text


async def test_an_end_token_is_no_text(held: ResponseBudget, tokenizer_files: dict[str, bytes]) -> None:
    held.engine.does.reply = [10, 11, 2]
    held.engine.does.end = 2
    answer = (await held.post(maxTokens=10)).json()
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
async def test_what_cannot_be_asked_is_refused(
    held: ResponseBudget, token: str, fields: dict[str, Any], status: int, words: str
) -> None:
    answer = await held.post(token, **fields)
    assert answer.status_code == status, answer.text
    assert words in answer.text
    assert not held.engine.requests


@pytest.mark.parametrize(
    ("refusal", "status"), [(RefusalCode.INVALID, 400), (RefusalCode.QUEUE_FULL, 503), (None, 504)]
)
async def test_what_an_engine_does_not_answer_says_why(
    held: ResponseBudget, refusal: RefusalCode | None, status: int
) -> None:
    if refusal is not None:
        held.engine.does.refuse = refusal
        answer = await held.post()
    else:
        held.engine.does.step_seconds, held.engine.does.fault = 0.01, "silent"
        answer = await held.post(seconds=0.3)
    assert answer.status_code == status, answer.text


async def test_an_engine_that_gives_up_is_to_be_asked_again(held: ResponseBudget) -> None:
    held.engine.does.fault = "error"
    answer = await held.post(maxTokens=10)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_while_another_serves_requests_go_there_alone(
    held: ResponseBudget, scripted: Any, until: Any
) -> None:
    other = scripted()
    held.table.sync([held.found, DiscoveredEngine(name="two", uid="pod-2", endpoint=other.endpoint)])
    await until(lambda: held.table.serving)
    client: openai.AsyncOpenAI = held.gateway.client(timeout=60)
    for _ in range(20):
        await client.completions.create(model="demo", prompt="real", max_tokens=1)
    assert (len(other.requests), len(held.engine.requests)) == (20, 0)


def test_how_long_an_answer_may_take() -> None:
    assert verify_timeout(b'{"service":"a","uid":"b","prompt":"c","maxTokens":1,"timeoutSeconds":7}') == 7
    assert verify_timeout(b"[") == 0
