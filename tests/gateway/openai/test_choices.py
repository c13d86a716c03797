# SPDX-License-Identifier: Apache-2.0
"""Several choices of one request: placement, shared prompt, limits and failures."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.wire.messages import RefusalCode

USER: list[Any] = [{"role": "user", "content": "What is a mast? " * 40}]


@pytest.fixture
def engine(scripted: Any, tokenizer: Tokenizer) -> Any:
    started = scripted()
    started.does.reply = tokenizer.encode("A mast holds the sails.", add_special_tokens=False)
    return started


def request_prompt(request: Any) -> list[int]:
    return np.frombuffer(request.prompt, "<i4").tolist()


async def test_choices_run_in_the_engine_that_has_the_prompt_cached(
    live: Any, scripted: Any, tokenizer: Tokenizer
) -> None:
    engines = [scripted(), scripted()]
    for engine in engines:
        engine.does.reply = tokenizer.encode("A mast.", add_special_tokens=False)
    gateway = await live(*engines, load_factor_percent=1000)
    answer = await gateway.client().chat.completions.create(
        model="demo", messages=USER, n=6, max_tokens=3, seed=11
    )
    assert len(answer.choices) == 6
    assert sorted(len(engine.requests) for engine in engines) == [0, 6]
    sent = max(engines, key=lambda engine: len(engine.requests)).requests
    assert len({tuple(request_prompt(request)) for request in sent}) == 1
    seeds = [request.sampling.seed for request in sent]
    assert 11 in seeds
    assert len(set(seeds)) == 6


async def test_other_choices_start_after_the_first_has_tokens(live: Any, engine: Any, until: Any) -> None:
    """Once the first choice has tokens, the other choices find its prompt in the engine's prefix cache."""
    engine.does.fault, engine.does.fault_after = "mute", 0
    gateway = await live(engine)
    request_task = asyncio.create_task(
        gateway.client().chat.completions.create(model="demo", messages=USER, n=3, max_tokens=2)
    )
    await until(lambda: engine.requests)
    marker = asyncio.create_task(
        gateway.client().completions.create(model="demo", prompt=[7, 7, 7], max_tokens=2)
    )
    await until(lambda: any(request_prompt(request) == [7, 7, 7] for request in engine.requests))
    assert len(engine.requests) == 2
    engine.does.fault = ""
    assert len((await request_task).choices) == 3
    await marker
    assert len(engine.requests) == 4


async def refuse_after_first(engine: Any, until: Any) -> None:
    """Let the engine start one request, then make it reject all later ones."""
    await until(lambda: engine.running)
    engine.does.refuse = RefusalCode.INVALID
    engine.does.fault = ""


async def test_request_fails_if_one_choice_fails(live: Any, engine: Any, until: Any) -> None:
    engine.does.fault, engine.does.fault_after = "mute", 0
    gateway = await live(engine)
    refusing = asyncio.create_task(refuse_after_first(engine, until))
    with pytest.raises(openai.BadRequestError, match="max_tokens is refused"):
        await gateway.client().chat.completions.create(model="demo", messages=USER, n=2, max_tokens=1000)
    await refusing
    await until(lambda: not engine.running)
    assert len(engine.aborts) == 1  # the other choice, which had not failed
    await until(lambda: not gateway.gateway.admission.in_flight)


async def test_stream_ends_with_an_error_if_one_choice_fails(live: Any, engine: Any, until: Any) -> None:
    engine.does.fault, engine.does.fault_after = "mute", 0
    gateway = await live(engine)
    refusing = asyncio.create_task(refuse_after_first(engine, until))
    body = {"model": "demo", "messages": USER, "n": 2, "max_tokens": 1000, "stream": True}
    async with httpx.AsyncClient(timeout=60) as http:
        response = await http.post(f"{gateway.url}/v1/chat/completions", json=body)
    await refusing
    assert response.status_code == 200  # the response had started with the first choice
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert json.loads(events[0])["choices"][0]["index"] == 0
    assert json.loads(events[-1])["error"]["param"] == "max_tokens"
    assert "[DONE]" not in events
    await until(lambda: not engine.running)
    await until(lambda: not gateway.gateway.admission.in_flight)


async def test_disconnect_aborts_all_choices(live: Any, engine: Any, until: Any) -> None:
    engine.does.step_seconds = 0.01
    gateway = await live(engine)
    stream = await gateway.client().chat.completions.create(
        model="demo", messages=USER, n=5, max_tokens=1000, stream=True
    )
    seen: set[int] = set()
    async for chunk in stream:
        seen |= {choice.index for choice in chunk.choices}
        if len(seen) == 5:
            break
    await stream.close()
    await until(lambda: not engine.running)
    await until(lambda: not gateway.gateway.admission.in_flight)
    assert sorted(engine.aborts) == sorted(request.rid for request in engine.requests)


async def test_choices_queue_when_only_one_may_run(live: Any, engine: Any) -> None:
    gateway = await live(engine, max_in_flight=1)
    answer = await gateway.client().completions.create(
        model="demo", prompt=["a", "b"], n=3, max_tokens=4, stream=False
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage.completion_tokens == 24


async def test_usage_counts_the_prompt_once_for_all_choices(
    live: Any, engine: Any, tokenizer: Tokenizer
) -> None:
    engine.does.cached_tokens = 2
    gateway = await live(engine)
    answer = await gateway.client().completions.create(
        model="demo", prompt=["one two", "three"], n=2, best_of=2, max_tokens=3
    )
    prompts = sum(len(tokenizer.encode(text)) for text in ("one two", "three"))
    assert answer.usage.prompt_tokens == prompts
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == prompts + 12
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


async def test_continuous_usage_is_in_every_event(live: Any, engine: Any) -> None:
    gateway = await live(engine)
    stream = await gateway.client().completions.create(
        model="demo",
        prompt="one two",
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
    )
    counts = [chunk.usage.completion_tokens async for chunk in stream]
    assert counts == sorted(counts)
    assert counts[-1] == 5


@pytest.mark.parametrize(
    "fields", [{"n": 4}, {"n": 1, "prompt": [[5] * 30, [6] * 30], "echo": True}, {"n": 1, "max_tokens": 40}]
)
async def test_logprobs_of_a_response_are_limited(
    live: Any, engine: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr("mizzen.gateway.requests.sequence.MAX_RESPONSE_LOGPROBS", 100)
    gateway = await live(engine)
    client = gateway.client()
    body: dict[str, Any] = {"model": "demo", "prompt": [5] * 10, "max_tokens": 10, "logprobs": 2, **fields}
    with pytest.raises(openai.BadRequestError, match="more than 100 log probabilities") as refused:
        await client.completions.create(**body)
    assert refused.value.param == "logprobs"
    body |= {"n": 1, "prompt": [5] * 10, "max_tokens": 10}
    assert (await client.completions.create(**body)).choices[0].logprobs
    del body["logprobs"]
    assert (await client.completions.create(**{**body, **fields})).choices
    assert gateway.gateway.in_flight == 0


async def test_tokens_of_an_unstreamed_response_are_limited(
    live: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mizzen.gateway.requests.sequence.MAX_RESPONSE_TOKENS", 100)
    gateway = await live(engine)
    client = gateway.client()
    body: dict[str, Any] = {"model": "demo", "prompt": "one", "max_tokens": 30}
    with pytest.raises(openai.BadRequestError, match="at most 100 tokens: ask for a stream") as refused:
        await client.completions.create(**body, n=4)
    assert refused.value.param == "stream"
    assert len((await client.completions.create(**body, n=3)).choices) == 3
    assert [chunk async for chunk in await client.completions.create(**body, n=4, stream=True)]
