"""Engines that fail, refuse, drain, come late or leave; queues and deadlines."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from typing import Any

import httpx
import openai
import pytest

from mizzen.gateway import dispatch
from mizzen.gateway.admit import Admission, Ticket
from mizzen.gateway.errors import ApiError
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.wire.messages import RefusalCode

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
FAULTS = ["gap", "garbage", "short", "error", "forget", "restart", "silent", "kill"]


async def text_of(client: openai.AsyncOpenAI, **options: Any) -> tuple[str, str | None]:
    stream = await client.chat.completions.create(**CHAT, stream=True, **options)
    parts: list[str] = []
    reason = None
    async for chunk in stream:
        parts.append(chunk.choices[0].delta.content or "")
        reason = chunk.choices[0].finish_reason or reason
    return "".join(parts), reason


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_stream_that_breaks_ends_with_an_error_event(live: Any, scripted: Any, fault: str) -> None:
    """Never shortened silently: what came is the beginning of the answer, then the client gets an error."""
    engine = scripted()
    engine.does.fault, engine.does.step_seconds = fault if fault != "kill" else "", 0.02
    gateway = await live(engine, max_resumes=0, engine_timeout_seconds=0.5, engine_lost_seconds=1.0)
    parts: list[str] = []
    body = {**CHAT, "stream": True, "max_tokens": 50, "return_token_ids": True}
    async with (
        httpx.AsyncClient(timeout=20) as http,
        http.stream("POST", f"{gateway.url}/v1/chat/completions", json=body) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line:
                parts.append(line.removeprefix("data: "))
                if fault == "kill" and len(parts) == 4:
                    await asyncio.to_thread(engine.kill)
    events = [json.loads(part) for part in parts]
    assert events[-1]["error"]["code"] == "engine_lost"
    assert not any(event["choices"][0]["finish_reason"] for event in events[:-1])
    ids = [i for event in events[:-1] for i in event["choices"][0].get("token_ids", [])]
    assert ids == (engine.does.reply * 20)[: len(ids)]
    assert len(ids) >= 2


async def test_the_official_client_raises_when_a_stream_breaks(live: Any, scripted: Any) -> None:
    engine = scripted()
    engine.does.fault = "gap"
    gateway = await live(engine, max_resumes=0)
    with pytest.raises(openai.APIError, match="broke off"):
        await text_of(gateway.client(), max_tokens=50)


@pytest.mark.parametrize("fault", FAULTS[:-1])
async def test_a_whole_answer_is_tried_again_elsewhere(live: Any, scripted: Any, fault: str) -> None:
    """Without resuming it starts over: nothing of it has reached the client."""
    bad, good = scripted(), scripted()
    bad.does.fault = fault
    gateway = await live(bad, good, max_resumes=0, engine_timeout_seconds=0.5, engine_lost_seconds=1.0)
    client = gateway.client()
    for _ in range(4):
        answer = await client.chat.completions.create(**CHAT, max_tokens=6)
        assert answer.usage.completion_tokens == 6
        assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("code", [RefusalCode.DRAINING, RefusalCode.QUEUE_FULL, RefusalCode.STARTING])
async def test_a_refused_request_is_tried_elsewhere(live: Any, scripted: Any, code: RefusalCode) -> None:
    bad, good = scripted(), scripted()
    bad.does.refuse = code
    gateway = await live(bad, good)
    client = gateway.client()
    assert [(await text_of(client, max_tokens=3))[1] for _ in range(6)] == ["length"] * 6
    assert len(good.requests) == 6


async def test_losses_before_the_first_token_are_tried_elsewhere(live: Any, scripted: Any) -> None:
    bad, good = scripted(), scripted()
    bad.does.fault, bad.does.fault_after = "restart", 0
    gateway = await live(bad, good)
    client = gateway.client()
    for _ in range(5):
        assert (await text_of(client, max_tokens=3))[1] == "length"
    assert len(good.requests) == 5


async def test_a_long_step_costs_no_stream_and_gets_nothing_new(live: Any, scripted: Any, until: Any) -> None:
    """A prompt that keeps an engine busy for long must not end what else runs there."""
    slow, other = scripted(), scripted()
    gateway = await live(slow, engine_timeout_seconds=0.5)
    slow.does.fault = "silent"
    client = gateway.client()
    tasks = [asyncio.create_task(text_of(client, max_tokens=9)) for _ in range(3)]
    (engine,) = gateway.gateway.table
    await until(lambda: engine.state == "broken")
    assert "silent" in engine.problem
    gateway.gateway.table.sync([engine.found, dataclasses.replace(engine.found, endpoint=other.endpoint)])
    assert (await text_of(client, max_tokens=3))[1] == "length"
    assert len(other.requests) == 1
    await asyncio.sleep(0.5)
    slow.does.fault = ""
    assert [reason for _, reason in await asyncio.gather(*tasks)] == ["length"] * 3
    await until(lambda: engine.state == "serving")
    assert len(slow.requests) == 3
    assert slow.hellos == 1


async def test_files_that_do_not_come_are_asked_for_again(live: Any, scripted: Any) -> None:
    engine = scripted()
    engine.does.deaf_to_files = 1
    gateway = await live(engine, wait=False, engine_timeout_seconds=0.5)
    await gateway.serving(1)
    assert engine.hellos == 1


async def test_an_engine_that_never_gives_a_token_is_given_up(
    live: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "MIN_ENGINE_SECONDS", 0.1)
    monkeypatch.setattr(dispatch, "ANSWER_MARGIN_SECONDS", 0.1)
    bad, good = scripted(), scripted()
    bad.does.fault, bad.does.fault_after = "mute", 0
    gateway = await live(bad, good, queue_timeout_seconds=0.1)
    for _ in range(4):
        assert (await text_of(gateway.client(), max_tokens=3))[1] == "length"
    assert len(good.requests) == 4
    assert len(bad.aborts) == len(bad.requests)


async def test_a_deadline_ends_a_request_that_gets_turns_and_no_engine() -> None:
    admission = Admission(lambda: 1, max_in_flight=1, queue_size=1)
    ticket = Ticket(time.monotonic() + 0.2)
    await admission.enter(ticket)
    with pytest.raises(ApiError, match="no engine took") as error:
        async with asyncio.timeout(5):
            while True:
                await admission.again(ticket, 0.02)
    assert error.value.status == 503
    assert admission.in_flight == 0


async def test_what_no_engine_would_take_is_400(live: Any, scripted: Any) -> None:
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


async def test_a_request_that_kills_engines_is_given_up(live: Any, scripted: Any) -> None:
    engine = scripted()
    engine.does.fault, engine.does.fault_after = "error", 0
    gateway = await live(engine, max_attempts=2)
    with pytest.raises(openai.InternalServerError, match="out of memory"):
        await text_of(gateway.client())
    assert len(engine.requests) == 2


async def test_requests_are_held_while_the_only_engine_is_replaced(
    live: Any, scripted: Any, until: Any
) -> None:
    first = scripted()
    endpoint = first.endpoint
    gateway = await live(first)
    await asyncio.to_thread(first.kill)
    await until(lambda: not any(engine.serving for engine in gateway.gateway.table))
    held = [asyncio.create_task(text_of(gateway.client(), max_tokens=3)) for _ in range(5)]
    await until(lambda: len(gateway.gateway.admission) == 5)
    second = scripted(endpoint=endpoint)
    assert [reason for _, reason in await asyncio.gather(*held)] == ["length"] * 5
    assert len(second.requests) == 5


async def test_without_an_engine_requests_wait_for_their_deadline(live: Any, until: Any) -> None:
    gateway = await live("tcp://127.0.0.1:9", wait=False, queue_timeout_seconds=0.4, queue_size=2)
    client, began = gateway.client(), time.monotonic()
    waiting = [asyncio.create_task(text_of(client)) for _ in range(2)]
    await until(lambda: len(gateway.gateway.admission) == 2)
    with pytest.raises(openai.RateLimitError) as full:
        await text_of(client)
    assert full.value.response.headers["retry-after"]
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert time.monotonic() - began >= 0.4
    for error in found:
        assert isinstance(error, openai.InternalServerError)
        assert error.status_code == 503
        assert error.response.headers["retry-after"]
        assert "no engine is ready" in str(error)
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{gateway.admin}/readyz")).status_code == 200


async def test_a_bounded_number_is_in_work_and_the_rest_in_order(
    live: Any, scripted: Any, until: Any
) -> None:
    engine = scripted()
    gateway = await live(engine, max_in_flight=1, queue_timeout_seconds=20)
    client = gateway.client()
    tasks = []
    for number in range(4):
        call = client.completions.create(model="demo", prompt=[100 + number], max_tokens=30)
        tasks.append(asyncio.create_task(call))
        await until(
            lambda n=number: len(gateway.gateway.admission) + gateway.gateway.admission.in_flight == n + 1
        )
    await asyncio.gather(*tasks)
    assert [request.prompt[0] for request in engine.requests] == [100, 101, 102, 103]


async def test_an_engine_full_by_its_own_count_is_not_overrun(live: Any, scripted: Any, until: Any) -> None:
    engine = scripted(max_running_requests=2)
    engine.does.step_seconds = 0.01
    gateway = await live(engine, queue_timeout_seconds=20)
    client = gateway.client()
    tasks = [asyncio.create_task(text_of(client, max_tokens=10)) for _ in range(25)]
    most = 0
    while not all(task.done() for task in tasks):
        most = max(most, engine.running)
        await asyncio.sleep(0.005)
    assert {task.result()[1] for task in tasks} == {"length"}
    assert most <= 10


async def test_a_draining_engine_gets_nothing_new_and_ends_what_it_has(
    live: Any, scripted: Any, until: Any
) -> None:
    old, new = scripted(), scripted()
    old.does.step_seconds = 0.02
    gateway = await live(old, new)
    client = gateway.client()
    tasks = [asyncio.create_task(text_of(client, max_tokens=40)) for _ in range(8)]
    await until(lambda: len(old.requests) + len(new.requests) == 8 and old.running)
    old.does.draining = True
    await until(lambda: any(engine.state == "draining" for engine in gateway.gateway.table))
    before = len(old.requests)
    tasks += [asyncio.create_task(text_of(client, max_tokens=3)) for _ in range(8)]
    assert {reason for _, reason in await asyncio.gather(*tasks)} == {"length"}
    assert len(old.requests) == before


async def test_a_retry_is_tokenized_again_for_another_tokenizer(
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


async def test_unusable_engines_are_left_out(
    live: Any, scripted: Any, until: Any, tokenizer_files: dict[str, bytes]
) -> None:
    nameless = {**tokenizer_files, "tokenizer_config.json": b'{"chat_template": [{"name": "default"}]}'}
    foreign, broken, good = scripted(protocol=99), scripted({"tokenizer.json": b"{"}), scripted()
    gateway = await live(foreign, broken, scripted(nameless), good, wait=False)
    await until(lambda: sorted(e.state for e in gateway.gateway.table) == ["broken"] * 3 + ["serving"])
    problems = {engine.problem for engine in gateway.gateway.table}
    assert any("protocol 99" in problem for problem in problems), problems
    assert any("tokenizer.json" in problem for problem in problems)
    assert (await text_of(gateway.client(), max_tokens=2))[1] == "length"


async def test_suspended(live: Any, scripted: Any) -> None:
    gateway = await live(scripted(), suspended=True)
    with pytest.raises(openai.InternalServerError, match="suspended") as error:
        await text_of(gateway.client())
    assert error.value.status_code == 503
    assert error.value.response.headers["retry-after"]


async def test_admin_api(live: Any, scripted: Any, tmp_path: Any, until: Any) -> None:
    token = tmp_path / "admin.token"
    token.write_text("s3cret\n")
    gateway = await live(scripted(), admin_token_file=str(token))
    async with httpx.AsyncClient() as http:
        url = f"{gateway.admin}/admin/engines"
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s3cret"}):
            assert (await http.get(url, headers=headers)).status_code == 401
        found = (await http.get(url, headers={"authorization": "Bearer s3cret"})).json()
        assert found["synced"] is True
        assert found["engines"][0]["state"] == "serving"
        assert found["engines"][0]["revision"] == "r1"
        assert found["engines"][0]["requests"] == 0
        await text_of(gateway.client(), max_tokens=3)
        metrics = (await http.get(f"{gateway.admin}/metrics")).text
        assert (
            'mizzen_gateway_requests_total{code="200",model="demo",path="/v1/chat/completions"} 1.0' in metrics
        )
        assert 'mizzen_gateway_output_tokens_total{model="demo"} 3.0' in metrics
        assert 'mizzen_gateway_engines{state="serving"} 1.0' in metrics
        assert (await http.get(f"{gateway.admin}/healthz")).status_code == 200
        gateway.gateway.draining = True
        assert (await http.get(f"{gateway.admin}/readyz")).status_code == 503
