# SPDX-License-Identifier: Apache-2.0
"""Engines that fail or refuse requests: retries, errors, and which failures count against an engine."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from chat_requests import CHAT, text_of
from mizzen.gateway.engines.circuit_breaker import BreakerState
from mizzen.gateway.routing import dispatcher
from mizzen.gateway.routing.resume import AnswerResumer, ResumeLimits
from mizzen.gateway.telemetry.metrics import Metrics
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.wire.client.stream import StreamLost
from mizzen.wire.messages import RefusalCode

FAULTS = ["gap", "garbage", "short", "error", "forget", "restart", "silent", "kill"]


@pytest.mark.parametrize("fault", FAULTS)
async def test_broken_stream_ends_with_an_error_event(live: Any, scripted: Any, fault: str) -> None:
    """The client gets the beginning of the answer and then an error, never a silently shortened answer."""
    engine = scripted()
    engine.does.fault, engine.does.step_seconds = fault if fault != "kill" else "", 0.02
    gateway = await live(engine, max_resumes=0, engine_timeout_seconds=0.5, engine_lost_seconds=1.0)
    event_lines: list[str] = []
    body = {**CHAT, "stream": True, "max_tokens": 50, "return_token_ids": True}
    async with (
        httpx.AsyncClient(timeout=60) as http,
        http.stream("POST", f"{gateway.url}/v1/chat/completions", json=body) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line:
                event_lines.append(line.removeprefix("data: "))
                if fault == "kill" and len(event_lines) == 4:
                    await asyncio.to_thread(engine.kill)
    events = [json.loads(event_line) for event_line in event_lines]
    assert events[-1]["error"]["code"] == "engine_lost"
    assert not any(event["choices"][0]["finish_reason"] for event in events[:-1])
    ids = [i for event in events[:-1] for i in event["choices"][0].get("token_ids", [])]
    assert ids == (engine.does.reply * 20)[: len(ids)]
    assert len(ids) >= 2


async def test_official_client_raises_on_a_broken_stream(live: Any, scripted: Any) -> None:
    engine = scripted()
    engine.does.fault = "gap"
    gateway = await live(engine, max_resumes=0)
    with pytest.raises(openai.APIError, match="was interrupted"):
        await text_of(gateway.client(), max_tokens=50)


@pytest.mark.parametrize("fault", FAULTS[:-1])
async def test_lost_unary_answer_is_retried_on_another_engine(live: Any, scripted: Any, fault: str) -> None:
    """Resuming is off, so the answer is generated again; the client has not received any part of it yet."""
    bad, good = scripted(), scripted()
    bad.does.fault = fault
    gateway = await live(bad, good, max_resumes=0, engine_timeout_seconds=0.5, engine_lost_seconds=1.0)
    client = gateway.client()
    for _ in range(4):
        answer = await client.chat.completions.create(**CHAT, max_tokens=6)
        assert answer.usage.completion_tokens == 6
        assert answer.choices[0].finish_reason == "length"


REFUSALS = [RefusalCode.DRAINING, RefusalCode.QUEUE_FULL, RefusalCode.STARTING, RefusalCode.BUSY]


@pytest.mark.parametrize("code", REFUSALS)
async def test_refused_request_is_retried_on_another_engine(
    live: Any, scripted: Any, code: RefusalCode
) -> None:
    bad, good = scripted(), scripted()
    bad.does.refuse = code
    gateway = await live(bad, good)
    client = gateway.client()
    assert [(await text_of(client, max_tokens=3))[1] for _ in range(6)] == ["length"] * 6
    assert len(good.requests) == 6


async def test_busy_refusal_does_not_back_off_the_engine(live: Any, scripted: Any, until: Any) -> None:
    """BUSY means that one tenant has too many grammars, so the engine must still get other requests."""
    engine = scripted()
    gateway = await live(engine, breaker_failures=1, queue_timeout_seconds=60)
    (table_engine,) = gateway.gateway.table
    back_offs: list[float] = []
    table_engine.back_off = back_offs.append
    engine.does.refuse = RefusalCode.BUSY
    waiting = asyncio.create_task(text_of(gateway.client(timeout=60), max_tokens=3))
    await until(lambda: len(engine.requests) >= 2)  # the request was retried
    assert not back_offs
    assert table_engine.breaker.state is BreakerState.CLOSED
    engine.does.refuse = None
    assert (await waiting)[1] == "length"


async def test_loss_before_the_first_token_is_retried_on_another_engine(live: Any, scripted: Any) -> None:
    bad, good = scripted(), scripted()
    bad.does.fault, bad.does.fault_after = "restart", 0
    gateway = await live(bad, good)
    client = gateway.client()
    for _ in range(5):
        assert (await text_of(client, max_tokens=3))[1] == "length"
    assert len(good.requests) == 5


async def test_engine_without_a_first_token_is_abandoned(
    live: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    monkeypatch.setattr(dispatcher, "MIN_ENGINE_SECONDS", 1.0)
    monkeypatch.setattr(dispatcher, "REFUSAL_MARGIN_SECONDS", 1.0)
    bad, good = scripted(), scripted()
    bad.does.fault, bad.does.fault_after = "mute", 0
    gateway = await live(bad, good, queue_timeout_seconds=1.0)
    texts = await asyncio.gather(*(text_of(gateway.client(), max_tokens=3) for _ in range(6)))
    assert [reason for _, reason in texts] == ["length"] * 6
    assert len(good.requests) >= 6
    assert bad.requests, "none was routed to it"
    await until(lambda: len(bad.aborts) == len(bad.requests))


async def test_request_that_every_engine_refuses_is_400(live: Any, scripted: Any) -> None:
    engine = scripted()
    engine.does.refuse = RefusalCode.INVALID
    gateway = await live(engine)
    with pytest.raises(openai.BadRequestError, match="max_tokens is refused") as error:
        await text_of(gateway.client())
    assert error.value.param == "max_tokens"
    engine.does.refuse = RefusalCode.QUEUE_TIMEOUT
    with pytest.raises(openai.InternalServerError) as late:
        await text_of(gateway.client())
    assert late.value.status_code == 503
    assert late.value.response.headers["retry-after"] == "1"


async def test_request_that_kills_engines_is_abandoned(live: Any, scripted: Any) -> None:
    engine = scripted()
    engine.does.fault, engine.does.fault_after = "error", 0
    gateway = await live(engine, max_attempts=2)
    with pytest.raises(openai.InternalServerError, match="out of memory"):
        await text_of(gateway.client())
    assert len(engine.requests) == 2


async def test_retry_is_tokenized_again_for_another_tokenizer(
    live: Any, scripted: Any, tokenizer_files: dict[str, bytes]
) -> None:
    config = {"chat_template": "other {{ messages[0].content }}"}
    changed = {**tokenizer_files, "tokenizer_config.json": json.dumps(config).encode()}
    old, new = scripted(), scripted(changed)
    gateway = await live(old, new)
    tokenizer = Tokenizer.from_files(tokenizer_files)
    client = gateway.client()
    old.does.refuse = RefusalCode.DRAINING
    for _ in range(6):
        assert (await text_of(client, max_tokens=2))[1] == "length"
    expected = tokenizer.encode("other hello", add_special_tokens=False)
    assert {request.prompt for request in new.requests} == {
        b"".join(i.to_bytes(4, "little") for i in expected)
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 2])
async def test_request_at_fault_does_not_count_against_an_engine(
    live: Any, scripted: Any, stream: bool, after: int
) -> None:
    """The request fails with 400 or an error event after one try; engines keep serving other requests."""
    engines = [scripted(), scripted()]
    for scripted_engine in engines:
        scripted_engine.does.fault, scripted_engine.does.fault_after = "own", after
    gateway = await live(*engines, breaker_failures=1)
    client = gateway.client()
    for _ in range(3):
        with pytest.raises(openai.APIError, match="guided_regex: a mask took 150 ms") as ended:
            answer = await client.chat.completions.create(
                **CHAT, stream=stream, extra_body={"guided_regex": "a+"}
            )
            if stream:
                assert [chunk async for chunk in answer]
        assert (ended.value.type, ended.value.param) == ("invalid_request_error", "guided_regex")
    assert sum(len(scripted_engine.requests) for scripted_engine in engines) == 3
    assert [engine.breaker.open_count for engine in gateway.gateway.engines] == [0, 0]
    assert gateway.gateway.in_flight == 0


@pytest.mark.parametrize(("cause", "blamed"), [("slow", 0), ("closed", 0), ("connection", 1)])
async def test_slow_readers_do_not_count_against_an_engine(cause: str, blamed: int) -> None:
    failures: list[int] = []
    engine = SimpleNamespace(name="e", draining=False, record_failure=failures.append)
    running: Any = SimpleNamespace(
        routed=SimpleNamespace(losses=0, handovers=0),
        engine=engine,
        stream=SimpleNamespace(abort=lambda: None),
        release=lambda cause: None,
        breaker_period=0,
    )

    async def place(routed: Any) -> Any:
        raise AssertionError("it may not be resumed")

    resumes = AnswerResumer(ResumeLimits(max_resumes=0), place, lambda: True, Metrics())
    assert await resumes.resume(running, StreamLost(cause, "lost")) is None
    assert len(failures) == blamed


@pytest.mark.parametrize("how", ["refuses", "fails", "dies"])
async def test_embeddings_are_retried_on_another_engine(live: Any, scripted: Any, how: str) -> None:
    bad, good = scripted(), scripted()
    gateway = await live(bad, good, breaker_failures=1000, engine_suspect_seconds=60)
    if how == "refuses":
        bad.does.refuse = RefusalCode.QUEUE_FULL
    elif how == "fails":
        bad.does.fault = "error"
    else:
        await asyncio.to_thread(bad.kill)
    for number in range(8):
        answer = await gateway.client().embeddings.create(
            model="demo", input=[number + 1, 2, 3], encoding_format="float"
        )
        assert answer.data[0].embedding == pytest.approx([0.6, 0.8])
        assert answer.usage.prompt_tokens == 3
    assert len(good.embeds) == 8
    good.does.fault = bad.does.fault = "error"
    if how != "dies":
        bad.does.refuse = None
    with pytest.raises(openai.InternalServerError, match="out of memory") as lost:
        await gateway.client().embeddings.create(model="demo", input=[1, 2])
    assert lost.value.response.headers["retry-after"]
    await asyncio.sleep(0)
    assert sum(engine.requests for engine in gateway.gateway.table) == 0
