# SPDX-License-Identifier: Apache-2.0
"""Requests that wait: for an engine, for capacity, and until their deadline."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import httpx
import openai
import pytest

from chat_requests import text_of
from mizzen.gateway.admission.admission import Admission
from mizzen.gateway.admission.queue_entry import QueueEntry
from mizzen.gateway.errors import ApiError


async def test_deadline_ends_a_request_that_is_admitted_but_never_placed() -> None:
    admission = Admission(lambda: 1, max_in_flight=1, queue_size=1)
    queue_entry = QueueEntry(time.monotonic() + 0.2)
    await admission.enter(queue_entry)
    with pytest.raises(ApiError, match="no engine took") as error:
        async with asyncio.timeout(60):
            while True:
                await admission.requeue(queue_entry, 0.02)
    assert error.value.status == 503
    assert admission.in_flight == 0


async def test_requests_wait_while_the_only_engine_is_replaced(live: Any, scripted: Any, until: Any) -> None:
    first = scripted()
    endpoint = first.endpoint
    gateway = await live(first)
    await asyncio.to_thread(first.kill)
    await until(lambda: not any(engine.serving for engine in gateway.gateway.table))
    waiting = [asyncio.create_task(text_of(gateway.client(), max_tokens=3)) for _ in range(5)]
    await until(lambda: len(gateway.gateway.admission) == 5)
    second = scripted(endpoint=endpoint)
    assert [reason for _, reason in await asyncio.gather(*waiting)] == ["length"] * 5
    assert len(second.requests) == 5


async def test_requests_without_an_engine_wait_until_their_deadline(live: Any, until: Any) -> None:
    gateway = await live("tcp://127.0.0.1:9", wait=False, queue_timeout_seconds=4.0, queue_size=2)
    client, began = gateway.client(), time.monotonic()
    waiting = [asyncio.create_task(text_of(client)) for _ in range(2)]
    await until(lambda: len(gateway.gateway.admission) == 2)
    with pytest.raises(openai.RateLimitError) as full:
        await text_of(client)
    assert full.value.response.headers["retry-after"]
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert time.monotonic() - began >= 4.0
    for error in results:
        assert isinstance(error, openai.InternalServerError)
        assert error.status_code == 503
        assert error.response.headers["retry-after"]
        assert "no engine is ready" in str(error)
    async with httpx.AsyncClient(timeout=60) as http:
        assert (await http.get(f"{gateway.admin}/readyz")).status_code == 200


async def test_requests_beyond_max_in_flight_are_served_in_order(
    live: Any, scripted: Any, until: Any
) -> None:
    engine = scripted()
    engine.does.fault, engine.does.fault_after = "mute", 0  # the first request runs until all have arrived
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


async def test_engine_gets_no_more_requests_than_it_runs_and_queues(
    live: Any, scripted: Any, until: Any
) -> None:
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


async def test_requests_wait_for_an_engine_to_be_started(
    live: Any, scripted: Any, tmp_path: Any, until: Any
) -> None:
    """While no engine runs, requests outlast the queue timeout, and the operator sees how many wait."""
    token = tmp_path / "admin.token"
    token.write_text("s3cret\n")
    options = {"queue_timeout_seconds": 0.2, "wake_timeout_seconds": 60, "queue_size": 3}
    gateway = await live("tcp://127.0.0.1:9", wait=False, admin_token_file=str(token), **options)
    waiting = [asyncio.create_task(text_of(gateway.client(), max_tokens=3)) for _ in range(3)]
    await until(lambda: len(gateway.gateway.admission) == 3)
    with pytest.raises(openai.RateLimitError) as full:
        await text_of(gateway.client())
    assert full.value.response.headers["retry-after"]
    assert "mizzen_gateway_waiting_requests 3.0" in gateway.gateway.metrics_text().decode()
    async with httpx.AsyncClient(headers={"authorization": "Bearer s3cret"}, timeout=60) as http:
        assert (await http.get(f"{gateway.admin}/admin/engines")).json()["waiting"] == 3
    await asyncio.sleep(0.4)
    assert not any(task.done() for task in waiting)
    engine = scripted()
    (gone,) = gateway.gateway.table
    gateway.gateway.table.sync([dataclasses.replace(gone.discovered, endpoint=engine.endpoint)])
    assert [reason for _, reason in await asyncio.gather(*waiting)] == ["length"] * 3
    assert "mizzen_gateway_waiting_requests 0.0" in gateway.gateway.metrics_text().decode()
