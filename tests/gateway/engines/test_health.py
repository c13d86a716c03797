# SPDX-License-Identifier: Apache-2.0
"""Health of engines: requests avoid unresponsive, stuck and failing engines in time."""

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


async def test_long_step_loses_no_stream_and_gets_no_new_request(
    live: Any, scripted: Any, until: Any
) -> None:
    """A prompt that keeps an engine busy for a long time must not end the engine's other requests."""
    slow, second_engine = scripted(), scripted()
    gateway = await live(slow, engine_timeout_seconds=0.5)
    slow.does.step_seconds = 0.02  # so that all answers are incomplete when the long step begins
    client = gateway.client(timeout=60)
    tasks = [asyncio.create_task(text_of(client, max_tokens=1500)) for _ in range(3)]
    (engine,) = gateway.gateway.table
    await until(
        lambda: slow.running == 3 and not engine.awaiting_first_token
    )  # requests without a first token would be retried on another engine
    slow.does.fault = "silent"
    await until(lambda: engine.state == "broken")
    assert "silent" in engine.problem
    gateway.gateway.table.sync(
        [engine.discovered, dataclasses.replace(engine.discovered, endpoint=second_engine.endpoint)]
    )
    assert (await text_of(client, max_tokens=3))[1] == "length"
    assert len(second_engine.requests) == 1
    slow.does.fault, slow.does.tokens_a_step = "", 100
    assert [reason for _, reason in await asyncio.gather(*tasks)] == ["length"] * 3
    await until(lambda: engine.state == "serving")
    assert len(slow.requests) == 3
    assert slow.hellos == 1


async def test_circuit_breaker_opens_and_closes_around_a_failing_engine(
    live: Any, scripted: Any, until: Any
) -> None:
    """The breaker is first closed, then open, half-open for one probe, open for longer, and closed again."""
    bad, good = scripted(), scripted()
    gateway = await live(bad, good, breaker_failures=2, queue_timeout_seconds=60)
    (first,) = [e for e in gateway.gateway.table if e.discovered.endpoint == bad.endpoint]
    client = gateway.client()
    bad.does.fault, bad.does.fault_after = "error", 0
    request_count = 0
    while not first.breaker.open_count:
        assert (await text_of(client, max_tokens=3))[1] == "length"
        request_count += 1
        assert request_count < 100
    assert f'breaker_opened{{engine="{bad.endpoint}"}} ' in gateway.gateway.metrics_text().decode()
    good.does.refuse = (
        RefusalCode.QUEUE_FULL
    )  # requests that arrive now wait for the probe of the failing engine
    waiting = [asyncio.create_task(text_of(client, max_tokens=3)) for _ in range(5)]
    await until(lambda: first.breaker.open_count >= 2)
    assert len(bad.requests) <= 2 + first.breaker.open_count, "one probe at a time"
    bad.does.fault = ""
    assert [reason for _, reason in await asyncio.gather(*waiting)] == ["length"] * 5
    assert first.breaker.state is BreakerState.CLOSED


async def test_silent_engine_is_suspect_long_before_its_timeout(live: Any, scripted: Any, until: Any) -> None:
    """Requests that have no token yet are retried on another engine; the others stay on the silent engine."""
    mute, second_engine = scripted(), scripted()
    gateway = await live(mute, engine_suspect_seconds=0.3, engine_timeout_seconds=60, engine_lost_seconds=120)
    mute.does.step_seconds = 0.02
    client = gateway.client()
    running = asyncio.create_task(text_of(client, max_tokens=1500))
    (engine,) = gateway.gateway.table
    await until(lambda: mute.running and next(iter(mute._runs.values())).tokens_sent > 2)
    mute.does.fault, mute.does.fault_after = "silent", 0
    early_request = asyncio.create_task(text_of(client, max_tokens=3))
    await until(lambda: engine.requests == 2)
    gateway.gateway.table.sync(
        [engine.discovered, dataclasses.replace(engine.discovered, endpoint=second_engine.endpoint)]
    )
    assert (await early_request)[1] == "length"
    assert len(second_engine.requests) == 1
    await until(lambda: engine.suspect)
    assert engine.serving, "it is suspect, not silent yet"
    assert engine.state == "suspect", "the state says that a request may not succeed now"
    for _ in range(4):
        assert (await text_of(client, max_tokens=3))[1] == "length"
    assert len(second_engine.requests) == 5
    mute.does.fault, mute.does.tokens_a_step = "", 100
    assert (await running)[1] == "length"
    await until(lambda: not engine.suspect)
    assert engine.state == "serving"
    assert engine.breaker.state is BreakerState.CLOSED


async def test_idle_engine_that_answers_pings_is_not_suspect(live: Any, scripted: Any, until: Any) -> None:
    engine = scripted()
    engine.does.stats_seconds = 1000.0
    gateway = await live(engine, engine_suspect_seconds=0.4, engine_timeout_seconds=60)
    (table_engine,) = gateway.gateway.table
    fetches_before = engine.fetches
    await until(lambda: engine.fetches >= fetches_before + 3)
    await until(lambda: not table_engine.suspect)  # its answer to a ping may be late on a busy machine


def test_engine_is_stuck_without_steps_while_requests_run() -> None:
    now, link = 0.0, SimpleNamespace(stats=None)
    progress = StepProgress(HealthLimits(stuck_after=10.0), lambda: now)
    never_reported = StepProgress(HealthLimits(stuck_after=0.0), lambda: now)
    reported_stats = [(0, 5), (1, 5), (1, 5), (1, 6), (1, 6), (1, 6), (1, 6), (0, 6), (0, 6), (1, 6), (1, 6)]
    stuck_after = []
    for at, (running, steps) in enumerate(reported_stats):
        now = 6.0 * at
        link.stats = SimpleNamespace(running=running, steps=steps, patience_seconds=0.5)
        stuck_after.append(progress.check_stuck(link))  # type: ignore[arg-type]
        assert not never_reported.check_stuck(link)  # type: ignore[arg-type]
    assert [at for at, stuck in enumerate(stuck_after) if stuck] == [2, 5, 10]


@pytest.mark.parametrize(
    ("announced_seconds", "spare", "stuck"),
    [
        (0.0, True, False),  # no announced step time, because of a prefill or a new batch size
        (1.0, False, False),  # no other engine could resume
        (1.0, True, True),
        (7.0, True, False),
        (6.0, True, True),
    ],
)
def test_announced_step_time_bounds_a_stuck_engine(
    announced_seconds: float, spare: bool, stuck: bool
) -> None:
    now = 0.0
    progress = StepProgress(HealthLimits(stuck_after=60.0, min_stuck_after=5.0), lambda: now)
    link: Any = SimpleNamespace(stats=SimpleNamespace(running=1, steps=3, patience_seconds=announced_seconds))
    assert not progress.check_stuck(link, spare)
    now = 4.9
    assert not progress.check_stuck(link, spare)
    now = 6.0
    assert progress.check_stuck(link, spare) is stuck


async def test_answers_of_a_stuck_engine_resume_on_another_engine(
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

    for text in await asyncio.gather(*(ask() for _ in range(6))):
        assert text == list(range(10, 40))
    assert bad.requests, "none was routed to it"
    await until(lambda: not bad.running)
