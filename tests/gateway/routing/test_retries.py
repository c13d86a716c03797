"""Engines that fail, refuse, drain, come late or leave; queues and deadlines."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from mizzen.gateway.admission.admission import Admission
from mizzen.gateway.admission.queue_entry import QueueEntry
from mizzen.gateway.engines.circuit_breaker import BreakerState
from mizzen.gateway.engines.health import HealthLimits, StepProgress
from mizzen.gateway.errors import ApiError
from mizzen.gateway.routing import dispatcher
from mizzen.gateway.routing.resume import AnswerResumer, ResumeLimits
from mizzen.gateway.telemetry.metrics import Metrics
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.wire.client.stream import StreamLost
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
        httpx.AsyncClient(timeout=60) as http,
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
    with pytest.raises(openai.APIError, match="was interrupted"):
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


REFUSALS = [RefusalCode.DRAINING, RefusalCode.QUEUE_FULL, RefusalCode.STARTING, RefusalCode.BUSY]


@pytest.mark.parametrize("code", REFUSALS)
async def test_a_refused_request_is_tried_elsewhere(live: Any, scripted: Any, code: RefusalCode) -> None:
    bad, good = scripted(), scripted()
    bad.does.refuse = code
    gateway = await live(bad, good)
    client = gateway.client()
    assert [(await text_of(client, max_tokens=3))[1] for _ in range(6)] == ["length"] * 6
    assert len(good.requests) == 6


async def test_a_request_turned_away_keeps_no_other_from_the_engine(
    live: Any, scripted: Any, until: Any
) -> None:
    """Grammars of one key may be too many; its engine has done nothing wrong, and serves what it takes."""
    engine = scripted()
    gateway = await live(engine, breaker_failures=1, queue_timeout_seconds=60)
    (known,) = gateway.gateway.table
    left_alone: list[float] = []
    known.back_off = left_alone.append
    engine.does.refuse = RefusalCode.BUSY
    waiting = asyncio.create_task(text_of(gateway.client(timeout=60), max_tokens=3))
    await until(lambda: len(engine.requests) >= 2)  # it was tried again
    assert not left_alone
    assert known.breaker.state is BreakerState.CLOSED
    engine.does.refuse = None
    assert (await waiting)[1] == "length"


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
    slow.does.step_seconds = 0.02  # far from their ends when the long step begins
    client = gateway.client(timeout=60)
    tasks = [asyncio.create_task(text_of(client, max_tokens=1500)) for _ in range(3)]
    (engine,) = gateway.gateway.table
    await until(lambda: slow.running == 3 and not engine.waiting)  # who has no token yet is tried elsewhere
    slow.does.fault = "silent"
    await until(lambda: engine.state == "broken")
    assert "silent" in engine.problem
    gateway.gateway.table.sync([engine.discovered, dataclasses.replace(engine.discovered, endpoint=other.endpoint)])
    assert (await text_of(client, max_tokens=3))[1] == "length"
    assert len(other.requests) == 1
    slow.does.fault, slow.does.tokens_a_step = "", 100
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
    live: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    monkeypatch.setattr(dispatcher, "MIN_ENGINE_SECONDS", 1.0)
    monkeypatch.setattr(dispatcher, "REFUSAL_MARGIN_SECONDS", 1.0)
    bad, good = scripted(), scripted()
    bad.does.fault, bad.does.fault_after = "mute", 0
    gateway = await live(bad, good, queue_timeout_seconds=1.0)
    found = await asyncio.gather(*(text_of(gateway.client(), max_tokens=3) for _ in range(6)))
    assert [reason for _, reason in found] == ["length"] * 6
    assert len(good.requests) >= 6
    assert bad.requests, "none was routed to it"
    await until(lambda: len(bad.aborts) == len(bad.requests))


async def test_a_deadline_ends_a_request_that_gets_turns_and_no_engine() -> None:
    admission = Admission(lambda: 1, max_in_flight=1, queue_size=1)
    queue_entry = QueueEntry(time.monotonic() + 0.2)
    await admission.enter(queue_entry)
    with pytest.raises(ApiError, match="no engine took") as error:
        async with asyncio.timeout(60):
            while True:
                await admission.requeue(queue_entry, 0.02)
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
    gateway = await live("tcp://127.0.0.1:9", wait=False, queue_timeout_seconds=4.0, queue_size=2)
    client, began = gateway.client(), time.monotonic()
    waiting = [asyncio.create_task(text_of(client)) for _ in range(2)]
    await until(lambda: len(gateway.gateway.admission) == 2)
    with pytest.raises(openai.RateLimitError) as full:
        await text_of(client)
    assert full.value.response.headers["retry-after"]
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert time.monotonic() - began >= 4.0
    for error in found:
        assert isinstance(error, openai.InternalServerError)
        assert error.status_code == 503
        assert error.response.headers["retry-after"]
        assert "no engine is ready" in str(error)
    async with httpx.AsyncClient(timeout=60) as http:
        assert (await http.get(f"{gateway.admin}/readyz")).status_code == 200


async def test_a_bounded_number_is_in_work_and_the_rest_in_order(
    live: Any, scripted: Any, until: Any
) -> None:
    engine = scripted()
    engine.does.fault, engine.does.fault_after = "mute", 0  # the first stays until all are there
    gateway = await live(engine, max_in_flight=1, queue_timeout_seconds=60)
    client = gateway.client()
    tasks = []
    for number in range(4):
        call = client.completions.create(model="demo", prompt=[100 + number], max_tokens=30)
        tasks.append(asyncio.create_task(call))
        await until(
            lambda n=number: len(gateway.gateway.admission) + gateway.gateway.admission.in_flight == n + 1
        )
    engine.does.fault = ""
    await asyncio.gather(*tasks)
    assert [request.prompt[0] for request in engine.requests] == [100, 101, 102, 103]


async def test_an_engine_full_by_its_own_count_is_not_overrun(live: Any, scripted: Any, until: Any) -> None:
    engine = scripted(max_running_requests=2)
    engine.does.step_seconds = 0.01
    gateway = await live(engine, queue_timeout_seconds=60)
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
    tasks = [asyncio.create_task(text_of(client, max_tokens=1500)) for _ in range(8)]
    new.does.tokens_a_step = 100
    await until(lambda: len(old.requests) + len(new.requests) == 8 and old.running)
    old.does.draining = True
    await until(lambda: any(engine.state == "draining" for engine in gateway.gateway.table))
    before, old.does.tokens_a_step = len(old.requests), 100
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


async def test_an_engine_is_of_another_protocol_when_it_refuses_a_gateway_for_what_it_says(
    live: Any, scripted: Any, until: Any
) -> None:
    codes = (RefusalCode.INVALID, RefusalCode.QUEUE_FULL, RefusalCode.STARTING)
    engines = [scripted() for _ in codes]
    for engine, code in zip(engines, codes, strict=True):
        engine.does.refuse_hello = code
    gateway = await live(*engines, wait=False)
    await until(lambda: all(engine.state == "broken" for engine in gateway.gateway.table))
    assert [engine.other_protocol for engine in gateway.gateway.table] == [True, False, False]
    engines[0].does.refuse_hello = None  # the pod has another engine now
    await until(lambda: any(engine.serving for engine in gateway.gateway.table))
    assert not any(engine.other_protocol for engine in gateway.gateway.table)


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
    async with httpx.AsyncClient(timeout=60) as http:
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
            'mizzen_gateway_requests_total{code="200",model="demo",path="/v1/chat/completions"} 1.0'
            in metrics
        )
        assert 'mizzen_gateway_output_tokens_total{model="demo"} 3.0' in metrics
        assert 'mizzen_gateway_engines{state="serving"} 1.0' in metrics
        assert (await http.get(f"{gateway.admin}/healthz")).status_code == 200
        gateway.gateway.draining = True
        assert (await http.get(f"{gateway.admin}/readyz")).status_code == 503


async def test_a_failing_engine_is_left_alone_and_tried_again(live: Any, scripted: Any, until: Any) -> None:
    """Closed, open, half-open with one probe, open for longer, and closed by a probe that goes well."""
    bad, good = scripted(), scripted()
    gateway = await live(bad, good, breaker_failures=2, queue_timeout_seconds=60)
    (first,) = [e for e in gateway.gateway.table if e.discovered.endpoint == bad.endpoint]
    client = gateway.client()
    bad.does.fault, bad.does.fault_after = "error", 0
    asked = 0
    while not first.breaker.open_count:
        assert (await text_of(client, max_tokens=3))[1] == "length"
        asked += 1
        assert asked < 100
    assert f'breaker_opened{{engine="{bad.endpoint}"}} ' in gateway.gateway.metrics_text().decode()
    good.does.refuse = RefusalCode.QUEUE_FULL  # what comes now waits for the probe
    waiting = [asyncio.create_task(text_of(client, max_tokens=3)) for _ in range(5)]
    await until(lambda: first.breaker.open_count >= 2)
    assert len(bad.requests) <= 2 + first.breaker.open_count, "one probe at a time"
    bad.does.fault = ""
    assert [reason for _, reason in await asyncio.gather(*waiting)] == ["length"] * 5
    assert first.breaker.state is BreakerState.CLOSED


async def test_one_that_should_have_been_heard_is_suspected_long_before_its_time_out(
    live: Any, scripted: Any, until: Any
) -> None:
    """What waits there for a first token goes elsewhere; what runs there stays."""
    mute, other = scripted(), scripted()
    gateway = await live(mute, engine_suspect_seconds=0.3, engine_timeout_seconds=60, engine_lost_seconds=120)
    mute.does.step_seconds = 0.02
    client = gateway.client()
    running = asyncio.create_task(text_of(client, max_tokens=1500))
    (engine,) = gateway.gateway.table
    await until(lambda: mute.running and next(iter(mute._runs.values())).given > 2)
    mute.does.fault, mute.does.fault_after = "silent", 0
    early = asyncio.create_task(text_of(client, max_tokens=3))
    await until(lambda: engine.requests == 2)
    gateway.gateway.table.sync([engine.discovered, dataclasses.replace(engine.discovered, endpoint=other.endpoint)])
    assert (await early)[1] == "length"
    assert len(other.requests) == 1
    await until(lambda: engine.suspect)
    assert engine.serving, "it is suspect, not silent yet"
    assert engine.state == "suspect", "whoever asks whether a request would succeed now is told"
    for _ in range(4):
        assert (await text_of(client, max_tokens=3))[1] == "length"
    assert len(other.requests) == 5
    mute.does.fault, mute.does.tokens_a_step = "", 100
    assert (await running)[1] == "length"
    await until(lambda: not engine.suspect)
    assert engine.state == "serving"
    assert engine.breaker.state is BreakerState.CLOSED


async def test_an_idle_engine_that_answers_is_not_suspected(live: Any, scripted: Any, until: Any) -> None:
    engine = scripted()
    engine.does.stats_seconds = 1000.0
    gateway = await live(engine, engine_suspect_seconds=0.4, engine_timeout_seconds=60)
    (one,) = gateway.gateway.table
    before = engine.fetches
    await until(lambda: engine.fetches >= before + 3)
    await until(lambda: not one.suspect)  # its answer may be late where others work


async def test_requests_wait_for_an_engine_to_be_woken(
    live: Any, scripted: Any, tmp_path: Any, until: Any
) -> None:
    """Scaled to zero: held beyond the time of a queue, within a bound, and told to whoever can wake one."""
    token = tmp_path / "admin.token"
    token.write_text("s3cret\n")
    options = {"queue_timeout_seconds": 0.2, "wake_timeout_seconds": 60, "queue_size": 3}
    gateway = await live("tcp://127.0.0.1:9", wait=False, admin_token_file=str(token), **options)
    held = [asyncio.create_task(text_of(gateway.client(), max_tokens=3)) for _ in range(3)]
    await until(lambda: len(gateway.gateway.admission) == 3)
    with pytest.raises(openai.RateLimitError) as full:
        await text_of(gateway.client())
    assert full.value.response.headers["retry-after"]
    assert "mizzen_gateway_waiting_requests 3.0" in gateway.gateway.metrics_text().decode()
    async with httpx.AsyncClient(headers={"authorization": "Bearer s3cret"}, timeout=60) as http:
        assert (await http.get(f"{gateway.admin}/admin/engines")).json()["waiting"] == 3
    await asyncio.sleep(0.4)
    assert not any(task.done() for task in held)
    engine = scripted()
    (gone,) = gateway.gateway.table
    gateway.gateway.table.sync([dataclasses.replace(gone.found, endpoint=engine.endpoint)])
    assert [reason for _, reason in await asyncio.gather(*held)] == ["length"] * 3
    assert "mizzen_gateway_waiting_requests 0.0" in gateway.gateway.metrics_text().decode()


async def test_a_response_says_where_it_went_and_the_admin_why(
    live: Any, scripted: Any, tmp_path: Any, until: Any
) -> None:
    token = tmp_path / "admin.token"
    token.write_text("s3cret\n")
    engines = [scripted(), scripted()]
    gateway = await live(*engines, admin_token_file=str(token), engine_suspect_seconds=60)
    prompt = list(range(50, 250))
    body = {"model": "demo", "prompt": prompt, "max_tokens": 3}
    admin, wrong = {"authorization": "Bearer s3cret"}, {"authorization": "Bearer wrong"}
    async with httpx.AsyncClient(timeout=60) as http:
        first = await http.post(f"{gateway.url}/v1/completions", json=body)
        engine = dict(part.split("=") for part in first.headers["x-mizzen-route"].split("; "))["engine"]
        assert engine in [one.endpoint for one in engines]
        again = await http.post(f"{gateway.url}/v1/completions", json=body)
        assert again.headers["x-mizzen-route"] == f"engine={engine}; reason=prefix; matched=192"
        streamed = await http.post(f"{gateway.url}/v1/completions", json={**body, "stream": True})
        assert streamed.headers["x-mizzen-route"] == again.headers["x-mizzen-route"]
        url = f"{gateway.admin}/debug/route"
        assert (await http.post(url, json=body)).status_code == 401
        assert (await http.post(url, json=body, headers=wrong)).status_code == 401
        found = (await http.post(url, json={**body, "user": "u"}, headers=admin)).json()
        assert (found["prompt_tokens"], found["prompt_blocks"], found["session"]) == (200, 3, "u")
        best, other = found["engines"]
        assert (best["name"], best["matched_tokens"]) == (engine, 192)
        assert other["matched_tokens"] == 0
        assert best["scores"]["prefix"] == pytest.approx(1.92)
        assert {"session", "load", "home"} < set(best["scores"])
        chat = await http.post(url, json={**CHAT}, headers={**admin, "x-mizzen-session": "s"})
        assert chat.json()["session"] == "s"
        long = await http.post(url, json={**body, "user": "u" * 7_000_000}, headers=admin)
        assert long.json()["session"] == "blake2b:" + blake2b(b"u" * 7_000_000, digest_size=16).hexdigest()
        for bad, status in ((b"[]", 400), (b"{", 400), (b'{"model": "demo"}', 400)):
            assert (await http.post(url, content=bad, headers=admin)).status_code == status
        absent = await http.post(url, json={**body, "model": "none"}, headers=admin)
        assert absent.status_code == 404
    assert sum(len(one.requests) for one in engines) == 3, "nothing that was explained was sent"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 2])
async def test_an_end_that_is_the_requests_own_fault_blames_no_engine(
    live: Any, scripted: Any, stream: bool, after: int
) -> None:
    """It is a 400 (or an event of one), tried once; who sends such requests takes no engine from others."""
    engines = [scripted(), scripted()]
    for one in engines:
        one.does.fault, one.does.fault_after = "own", after
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
    assert sum(len(one.requests) for one in engines) == 3
    assert [engine.breaker.open_count for engine in gateway.gateway.engines] == [0, 0]
    assert gateway.gateway.in_flight == 0


@pytest.mark.parametrize(("cause", "blamed"), [("slow", 0), ("closed", 0), ("connection", 1)])
async def test_engines_are_not_blamed_for_slow_readers(cause: str, blamed: int) -> None:
    failures: list[int] = []
    engine = SimpleNamespace(name="e", draining=False, failed=failures.append)
    running: Any = SimpleNamespace(
        routed=SimpleNamespace(losses=0, handovers=0),
        engine=engine,
        stream=SimpleNamespace(abort=lambda: None),
        release=lambda cause: None,
        period=0,
    )

    async def place(routed: Any) -> Any:
        raise AssertionError("it may not be resumed")

    resumes = AnswerResumer(ResumeLimits(max_resumes=0), place, lambda: True, Metrics())
    assert await resumes.resume(running, StreamLost(cause, "lost")) is None
    assert len(failures) == blamed


async def test_routes_are_explained_as_requests_are_read(live: Any, scripted: Any, tmp_path: Any) -> None:
    """With the gateway's own families of tools, and within its bounds."""
    (tmp_path / "token").write_text("s3cret")
    options = {"admin_token_file": str(tmp_path / "token"), "tool_parser": "hermes", "max_body_bytes": 2000}
    gateway = await live(scripted(), **options)
    tools = [{"type": "function", "function": {"name": "tell"}}]
    admin = {"authorization": "Bearer s3cret"}
    async with httpx.AsyncClient(timeout=60) as http:
        url = f"{gateway.admin}/debug/route"
        found = await http.post(url, json={**CHAT, "tools": tools}, headers=admin)
        assert found.status_code == 200, found.text
        for path in ("debug/route", "admin/verify"):
            large = await http.post(f"{gateway.admin}/{path}", content=b" " * 2001, headers=admin)
            assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")


async def test_sessions_stay_with_their_engine(live: Any, scripted: Any) -> None:
    """In every gateway alike, by header, prompt_cache_key or user; without one they spread."""
    engines = [scripted() for _ in range(3)]
    gateways = [await live(*engines, engine_suspect_seconds=60) for _ in range(2)]
    homes: dict[str, set[str]] = {}
    async with httpx.AsyncClient(timeout=60) as http:
        for number in range(24):
            session = f"s{number % 6}"
            how = [{"user": session}, {"prompt_cache_key": session}, {}][number % 3 if number >= 12 else 0]
            headers = {} if how else {"x-mizzen-session": session}
            gateway = gateways[number % 2]
            body = {**CHAT, "max_tokens": 2, **how}
            response = await http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers)
            route = response.headers["x-mizzen-route"]
            homes.setdefault(session, set()).add(route.partition(";")[0])
    assert all(len(found) == 1 for found in homes.values()), homes
    assert len(set().union(*homes.values())) > 1


@pytest.mark.parametrize("how", ["refuses", "fails", "dies"])
async def test_embeddings_are_tried_elsewhere_too(live: Any, scripted: Any, how: str) -> None:
    bad, good = scripted(), scripted()
    gateway = await live(bad, good, breaker_failures=1000, engine_suspect_seconds=60)
    if how == "refuses":
        bad.does.refuse = RefusalCode.QUEUE_FULL
    elif how == "fails":
        bad.does.fault = "error"
    else:
        await asyncio.to_thread(bad.kill)
    for number in range(8):
        found = await gateway.client().embeddings.create(
            model="demo", input=[number + 1, 2, 3], encoding_format="float"
        )
        assert found.data[0].embedding == pytest.approx([0.6, 0.8])
        assert found.usage.prompt_tokens == 3
    assert len(good.embeds) == 8
    good.does.fault = bad.does.fault = "error"
    if how != "dies":
        bad.does.refuse = None
    with pytest.raises(openai.InternalServerError, match="out of memory") as lost:
        await gateway.client().embeddings.create(model="demo", input=[1, 2])
    assert lost.value.response.headers["retry-after"]
    await asyncio.sleep(0)
    assert sum(engine.requests for engine in gateway.gateway.table) == 0


def test_progress_is_what_steps_tell_while_requests_run() -> None:
    now, link = 0.0, SimpleNamespace(stats=None)
    progress = StepProgress(HealthLimits(stuck_after=10.0), lambda: now)
    never = StepProgress(HealthLimits(stuck_after=0.0), lambda: now)
    said = [(0, 5), (1, 5), (1, 5), (1, 6), (1, 6), (1, 6), (1, 6), (0, 6), (0, 6), (1, 6), (1, 6)]
    found = []
    for at, (running, steps) in enumerate(said):
        now = 6.0 * at
        link.stats = SimpleNamespace(running=running, steps=steps, patience_seconds=0.5)
        found.append(progress.check_stuck(link))  # type: ignore[arg-type]
        assert not never.check_stuck(link)  # type: ignore[arg-type]
    assert [at for at, stuck in enumerate(found) if stuck] == [2, 5, 10]


@pytest.mark.parametrize(
    ("said", "spare", "stuck"),
    [
        (0.0, True, False),  # a prompt, or something new: it may take its time
        (1.0, False, False),  # nobody else could go on
        (1.0, True, True),
        (7.0, True, False),
        (6.0, True, True),
    ],
)
def test_an_engine_that_says_how_long_its_steps_take_is_taken_at_its_word(
    said: float, spare: bool, stuck: bool
) -> None:
    now = 0.0
    progress = StepProgress(HealthLimits(stuck_after=60.0, min_stuck_after=5.0), lambda: now)
    link: Any = SimpleNamespace(stats=SimpleNamespace(running=1, steps=3, patience_seconds=said))
    assert not progress.check_stuck(link, spare)
    now = 4.9
    assert not progress.check_stuck(link, spare)
    now = 6.0
    assert progress.check_stuck(link, spare) is stuck


async def test_an_engine_that_answers_and_makes_no_step_loses_its_answers(
    live: Any, scripted: Any, until: Any
) -> None:
    bad, good = scripted(), scripted()
    for engine in (bad, good):
        engine.does.reply = list(range(10, 40))
    gateway = await live(bad, good, engine_stuck_seconds=0.5, engine_lost_seconds=120)
    bad.does.fault = "mute"

    async def ask() -> list[int]:
        body = {"model": "demo", "prompt": "a", "max_tokens": 30, "return_token_ids": True}
        async with httpx.AsyncClient(timeout=60) as http:
            answer = await http.post(f"{gateway.url}/v1/completions", json=body)
        return answer.json()["choices"][0]["token_ids"]

    for found in await asyncio.gather(*(ask() for _ in range(6))):
        assert found == list(range(10, 40))
    assert bad.requests, "none was routed to it"
    await until(lambda: not bad.running)
