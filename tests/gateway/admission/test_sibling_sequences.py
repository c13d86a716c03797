# SPDX-License-Identifier: Apache-2.0
"""Requests with more sequences than can run at once: sequences wait, and other requests are not delayed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from mizzen.gateway.admission.admission import Admission
from mizzen.gateway.admission.queue_entry import QueueEntry
from mizzen.gateway.admission.sibling_sequences import SiblingSequences
from mizzen.gateway.errors import ApiError
from mizzen.wire.messages import RefusalCode
from tenant_kit import ALICE, BOB, key_file


def start_request(gateway: Any, key: str = "none", **changes: Any) -> asyncio.Task[Any]:
    body: Any = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 100, **changes}
    return asyncio.create_task(gateway.client(key).completions.create(**body))


def two_keys(folder: Path) -> tuple[str]:
    path = folder / "keys.yaml"
    path.write_text(key_file({"name": "a", "key": ALICE}, {"name": "b", "key": BOB}))
    return (str(path),)


@pytest.fixture
def slow(scripted: Any) -> Any:
    """Start an engine that takes at least 0.2 s for an answer of 100 tokens."""
    engine = scripted()
    engine.does.step_seconds, engine.does.tokens_a_step = 0.02, 10
    return engine


@pytest.mark.parametrize("stream", [False, True])
async def test_many_choices_outlast_the_queue_timeout(live: Any, slow: Any, stream: bool) -> None:
    gateway = await live(slow, max_in_flight=2, queue_timeout_seconds=0.5)
    began = time.monotonic()
    answer = await start_request(gateway, n=12, stream=stream)
    if stream:
        events = [event async for event in answer]
        ends = {choice.index for event in events for choice in event.choices if choice.finish_reason}
    else:
        ends = {choice.index for choice in answer.choices}
    assert ends == set(range(12))
    assert time.monotonic() - began > 1.0


async def test_many_choices_fit_in_a_short_queue(live: Any, slow: Any, until: Any) -> None:
    """Only one choice of a request occupies the queue at a time, but all waiting choices are reported."""
    gateway = await live(slow, max_in_flight=2, queue_size=1)
    many = start_request(gateway, n=16)
    await until(lambda: len(gateway.gateway.admission) == 14)
    assert len(gateway.gateway.admission._queue) == 1
    with pytest.raises(openai.RateLimitError) as full:
        await start_request(gateway)
    assert full.value.code == "queue_full"
    assert len((await many).choices) == 16
    assert len(gateway.gateway.admission) == 0


@pytest.mark.parametrize("kind", ["embeddings", "scores"])
async def test_many_inputs_fit_in_a_short_queue(live: Any, slow: Any, kind: str) -> None:
    gateway = await live(slow, max_in_flight=1, queue_size=1)
    if kind == "embeddings":
        inputs = [[5, number] for number in range(20)]
        answer = await gateway.client().embeddings.create(model="demo", input=inputs, encoding_format="float")
        assert len(answer.data) == 20
    else:
        answer = await start_request(gateway, prompt=[[5, number] for number in range(20)], max_tokens=1)
        assert len(answer.choices) == 20


async def test_choices_of_a_started_request_are_not_evicted(
    live: Any, slow: Any, until: Any, tmp_path: Path
) -> None:
    """When other tenants fill the queue, no sequence of a request that has started is evicted."""
    gateway = await live(slow, max_in_flight=1, queue_size=3, api_keys_file=two_keys(tmp_path))
    many = start_request(gateway, ALICE, n=6)
    await until(lambda: gateway.gateway.admission._queue)
    other_requests = [start_request(gateway, BOB) for _ in range(8)]
    results = await asyncio.gather(*other_requests, return_exceptions=True)
    assert any(isinstance(result, openai.RateLimitError) for result in results)
    assert len((await many).choices) == 6


async def test_choices_neither_overtake_nor_starve_other_requests(
    live: Any, slow: Any, until: Any, tmp_path: Path
) -> None:
    gateway = await live(slow, max_in_flight=1, queue_size=24, api_keys_file=two_keys(tmp_path))
    many = start_request(gateway, ALICE, n=30)
    await until(lambda: len(slow.requests) >= 2)
    requests_before = len(slow.requests)
    for key in (BOB, ALICE):  # a request with another key, and one with the same key
        await start_request(gateway, key)
    assert (
        len(slow.requests) - requests_before <= 2 + 1 + 1 + 3 + 1
    )  # running, one more choice, and the queued ones
    assert not many.done()
    assert len((await many).choices) == 30


async def test_choices_refused_for_waiting_in_an_engine_wait_again(live: Any, slow: Any) -> None:
    gateway = await live(slow, queue_timeout_seconds=60.0)
    slow.does.step_seconds, take = 0.1, slow._generate

    def only_the_first(peer: bytes, message: Any) -> None:
        slow.does.refuse = RefusalCode.QUEUE_TIMEOUT if 0 < len(slow.requests) < 8 else None
        take(peer, message)

    slow._generate = only_the_first
    stream = await start_request(gateway, n=4, stream=True, max_tokens=500)
    ends = {choice.index async for event in stream for choice in event.choices if choice.finish_reason}
    assert ends == set(range(4))
    assert len(slow.requests) == 11  # seven of them were refused


async def test_request_that_never_started_waits_no_longer_than_others(
    live: Any, slow: Any, until: Any
) -> None:
    gateway = await live(slow, max_in_flight=1, queue_timeout_seconds=0.3)
    slow.does.step_seconds = 0.2
    alone = start_request(gateway)
    await until(lambda: slow.running)
    with pytest.raises(openai.InternalServerError, match="too many requests are in progress") as refused:
        await start_request(gateway, prompt=[[1], [2], [3]], n=2)
    assert refused.value.status_code == 503
    await alone
    await until(lambda: not gateway.gateway.in_flight and not len(gateway.gateway.admission))


async def test_queue_time_counts_from_when_no_sibling_runs() -> None:
    admission, siblings = Admission(lambda: 1, max_in_flight=1, queue_size=8), SiblingSequences(0.2, 8)
    runs = QueueEntry(time.monotonic() + 60, siblings=siblings)
    await admission.enter(runs)
    siblings.sequence_started()
    waits = asyncio.create_task(admission.enter(QueueEntry(time.monotonic() + 0.05, siblings=siblings)))
    await asyncio.sleep(0.5)
    assert not waits.done()
    siblings.sequence_ended()
    began = time.monotonic()
    with pytest.raises(ApiError, match="too many requests are in progress"):
        await waits
    assert time.monotonic() - began > 0.15
    admission.leave(runs)
    assert (admission.in_flight, len(admission)) == (0, 0)


async def test_cancelled_sibling_releases_its_queue_slot() -> None:
    admission, siblings = Admission(lambda: 1, max_in_flight=1, queue_size=8), SiblingSequences(60, 1)
    entries = [QueueEntry(time.monotonic() + 60, siblings=siblings) for _ in range(4)]
    await admission.enter(entries[0])
    tasks = [asyncio.create_task(admission.enter(queue_entry)) for queue_entry in entries[1:]]
    await asyncio.sleep(0)
    assert (len(admission), len(admission._queue)) == (3, 1)
    for task in tasks[:2]:  # the sibling in the queue, and the next one
        task.cancel()
    await asyncio.gather(*tasks[:2], return_exceptions=True)
    admission.leave(entries[0])
    await tasks[2]
    assert (admission.in_flight, len(admission)) == (1, 0)
    admission.leave(entries[3])
    assert admission.in_flight == 0
