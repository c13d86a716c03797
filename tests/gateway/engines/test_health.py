"""Health of engines: unresponsive, stuck and failing ones are avoided in time."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from chat_requests import text_of
from mizzen.gateway.engines.circuit_breaker import BreakerState
from mizzen.gateway.engines.health import HealthLimits, StepProgress
from mizzen.wire.messages import RefusalCode


async def test_a_long_step_costs_no_stream_and_gets_nothing_new(live: Any, scripted: Any, until: Any) -> None:
    """A prompt that keeps an engine busy for long must not end what else runs there."""
    slow, other = scripted(), scripted()
    gateway = await live(slow, engine_timeout_seconds=0.5)
    slow.does.step_seconds = 0.02  # far from their ends when the long step begins
    client = gateway.client(timeout=60)
    tasks = [asyncio.create_task(text_of(client, max_tokens=1500)) for _ in range(3)]
    (engine,) = gateway.gateway.table
    await until(
        lambda: slow.running == 3 and not engine.awaiting_first_token
    )  # who has no token yet is tried elsewhere
    slow.does.fault = "silent"
    await until(lambda: engine.state == "broken")
    assert "silent" in engine.problem
    gateway.gateway.table.sync(
        [engine.discovered, dataclasses.replace(engine.discovered, endpoint=other.endpoint)]
    )
    assert (await text_of(client, max_tokens=3))[1] == "length"
    assert len(other.requests) == 1
    slow.does.fault, slow.does.tokens_a_step = "", 100
    assert [reason for _, reason in await asyncio.gather(*tasks)] == ["length"] * 3
    await until(lambda: engine.state == "serving")
    assert len(slow.requests) == 3
    assert slow.hellos == 1


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
    gateway.gateway.table.sync(
        [engine.discovered, dataclasses.replace(engine.discovered, endpoint=other.endpoint)]
    )
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
