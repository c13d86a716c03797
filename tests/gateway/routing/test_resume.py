# SPDX-License-Identifier: Apache-2.0
"""Answers that resume on another engine: clients see no gap, no repeated token, and correct counts."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mizzen.gateway.auth.rate_limits import TokenBucket
from mizzen.gateway.text.tokenizer import Tokenizer

FAULTS = ["gap", "garbage", "short", "error", "forget", "restart"]
STORY = "Ein Schiff mit drei Masten: Groß- und Besanmast. 你好,世界。 🙂🚀 family: 👨‍👩‍👧 It routes. END more"
PATIENT = {
    "resume_wait_seconds": 60,
    "engine_timeout_seconds": 60,
    "engine_lost_seconds": 120,
    "engine_suspect_seconds": 60,
}
"""Timeouts that are long enough for slow machines, so that only the test itself interrupts requests."""


@pytest.fixture
def story(tokenizer_files: dict[str, bytes]) -> list[int]:
    """Tokens of a text in which some characters span several tokens; a stop string is near its end."""
    return Tokenizer.from_files(tokenizer_files).encode(STORY, add_special_tokens=False)


def fields(stream: bool, **options: Any) -> dict[str, Any]:
    body = {"model": "demo", "prompt": "Once upon a time", "return_token_ids": True, **options}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


async def ask(client: openai.AsyncOpenAI, stream: bool, **options: Any) -> dict[str, Any]:
    """Return the text, token ids and other parts of an answer, streamed or not."""
    extra = {key: options.pop(key) for key in ("top_k",) if key in options}
    body = fields(stream, **options)
    extra["return_token_ids"] = body.pop("return_token_ids")
    if not stream:
        answer = await client.completions.create(**body, extra_body=extra)
        choice = answer.choices[0].model_dump()
        return {
            "text": choice["text"],
            "ids": choice["token_ids"],
            "reason": choice["finish_reason"],
            "logprobs": choice["logprobs"],
            "usage": answer.usage.model_dump(),
        }
    result: dict[str, Any] = {"text": "", "ids": [], "reason": None, "logprobs": None, "usage": None}
    async for chunk in await client.completions.create(**body, extra_body=extra):
        if chunk.usage is not None:
            result["usage"] = chunk.usage.model_dump()
        for choice in chunk.choices:
            choice_json = choice.model_dump()
            assert result["reason"] is None, "nothing comes after the end"
            result["text"] += choice_json["text"]
            result["ids"] += choice_json["token_ids"] or []
            result["reason"] = choice_json["finish_reason"]
            if choice_json["logprobs"] is not None:
                merged = result["logprobs"] or {key: [] for key in choice_json["logprobs"]}
                result["logprobs"] = {
                    key: merged[key] + (choice_json["logprobs"][key] or []) for key in merged
                }
    return result


def received(engine: Any) -> list[int]:
    """Return how many tokens the gateway has received of each running answer of an engine, sorted."""
    return sorted(stream.received for stream in engine.link._handles.all())


def resumes(gateway: Any) -> float:
    """Return the number of resumed answers."""
    lines = gateway.gateway.metrics_text().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("mizzen_gateway_resumes_total{"))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
async def test_answer_resumes_on_another_engine(
    live: Any, scripted: Any, story: list[int], fault: str, stream: bool
) -> None:
    engines = [scripted(), scripted()]
    for engine in engines:
        engine.does.reply, engine.does.end = story, story[-1]
        engine.does.tokens_a_step = 2
    gateway = await live(*engines, breaker_failures=1000, max_resumes=50, **PATIENT)
    calm = await ask(gateway.client(), stream, max_tokens=200)
    for engine in engines:
        engine.does.fault, engine.does.cuts = fault, (7,)
    for _ in range(3):
        assert await ask(gateway.client(), stream, max_tokens=200) == calm
    assert calm["ids"] == story
    assert calm["usage"]["completion_tokens"] == len(story)
    assert resumes(gateway) >= 3, "more where tokens on their way were lost, and the next engine met the cut"
    resumed = [request for engine in engines for request in engine.requests if request.generated]
    assert len(resumed) >= 3
    firsts = {request.prompt for engine in engines for request in engine.requests if not request.generated}
    assert len(firsts) == 1
    assert all(request.prompt.startswith(next(iter(firsts))) for request in resumed)


@pytest.mark.parametrize("stop", [None, ["END"], ["routes", "zzz"]])
async def test_resume_after_any_token_leaves_no_trace(
    live: Any, scripted: Any, story: list[int], stop: Any
) -> None:
    """Text, stop strings, logprobs and counts do not depend on the token at which an engine is lost."""
    engines = [scripted(), scripted(), scripted()]
    for engine in engines:
        engine.does.reply, engine.does.end, engine.does.step_seconds = story, story[-1], 0.001
    gateway = await live(*engines, max_resumes=100, breaker_failures=100_000, **PATIENT)
    client = gateway.client()
    options = {"max_tokens": 200, "stop": stop, "logprobs": 1}
    calm = {stream: await ask(client, stream, **options) for stream in (True, False)}
    assert calm[True]["text"] == calm[False]["text"]
    for engine in engines:
        engine.does.fault = "error"
    draw = random.Random(7)
    cuts = [(cut,) for cut in range(1, len(story), 2)]
    cuts += [tuple(sorted(draw.sample(range(1, len(story)), 3))) for _ in range(15)]
    for number, where in enumerate(cuts):
        for engine in engines:
            engine.does.cuts = where
            engine.does.tokens_a_step = 1 + number % 3
        stream = number % 2 == 0
        answer = await ask(client, stream, **options)
        assert answer["text"] == calm[stream]["text"], where
        assert answer["ids"] == calm[stream]["ids"], where
        assert answer["reason"] == calm[stream]["reason"]
        assert answer["usage"] == calm[stream]["usage"]
        assert answer["logprobs"]["token_logprobs"] == calm[stream]["logprobs"]["token_logprobs"], where
        assert answer["logprobs"]["tokens"] == calm[stream]["logprobs"]["tokens"]
    assert resumes(gateway) >= len(cuts) / 2
    assert stop is not None or resumes(gateway) == sum(map(len, cuts))


async def test_seed_is_fixed_at_the_start(live: Any, scripted: Any) -> None:
    """All engines that generate parts of one answer use the same seed; other answers have other seeds."""
    engines = [scripted(), scripted()]
    for engine in engines:
        engine.does.fault, engine.does.cuts = "error", (3, 6)
    gateway = await live(*engines, **PATIENT)
    await ask(gateway.client(), True, max_tokens=12)
    await ask(gateway.client(), True, max_tokens=12)
    await ask(gateway.client(), True, max_tokens=12, seed=42)
    requests = sorted(
        (request for engine in engines for request in engine.requests),
        key=lambda request: request.sampling.seed,
    )
    seeds = [(seed, len(list(group))) for seed, group in itertools.groupby(requests, _seed)]
    assert [count for _, count in seeds] == [3, 3, 3]
    assert seeds[0][0] == 42
    assert {request.sampling.max_tokens for request in requests} == {12}


def _seed(request: Any) -> int:
    assert request.sampling.seed is not None
    return request.sampling.seed


async def test_answer_waits_for_a_replacement_of_the_only_engine(
    live: Any, scripted: Any, until: Any
) -> None:
    """A new engine that joins later continues the answer."""
    first = scripted()
    first.does.step_seconds = 0.02
    gateway = await live(first)
    tasks = [asyncio.create_task(ask(gateway.client(), stream, max_tokens=1500)) for stream in (True, False)]
    (engine,) = gateway.gateway.table
    await until(lambda: first.running == 2 and received(engine) >= [3, 3])
    await asyncio.to_thread(first.kill)
    await until(lambda: not engine.serving)
    second = scripted(endpoint=first.endpoint)
    second.does.tokens_a_step = 100
    for answer in await asyncio.gather(*tasks):
        assert answer["ids"] == first.does.reply * 500
        assert answer["usage"]["completion_tokens"] == 1500
    assert all(request.generated for request in second.requests)


async def test_answer_waits_at_most_the_resume_timeout(live: Any, scripted: Any, until: Any) -> None:
    engine = scripted()
    engine.does.step_seconds = 0.02
    gateway = await live(engine, resume_wait_seconds=0.3)
    task = asyncio.create_task(ask(gateway.client(), True, max_tokens=1500))
    (table_engine,) = gateway.gateway.table
    await until(lambda: received(table_engine) >= [1])
    await asyncio.to_thread(engine.kill)
    with pytest.raises(openai.APIError, match="no engine has taken over"):
        await task
    assert gateway.gateway.admission.in_flight == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_interrupted_answer_is_charged_for_delivered_tokens(
    live: Any, scripted: Any, until: Any, tmp_path: Path, stream: bool
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text('{"keys": [{"name": "a", "key": "sk-a-0123456789", "tokensPerMinute": 100000}]}')
    engine = scripted()
    engine.does.step_seconds = 0.02
    gateway = await live(engine, resume_wait_seconds=0.3, api_keys_file=(str(path),))
    tenant = gateway.gateway.tenants.get("a")
    tenant.tokens = TokenBucket(100_000, lambda: 0.0)  # the clock stands still, so no tokens are refilled
    task = asyncio.create_task(
        ask(gateway.client("sk-a-0123456789"), stream, prompt=[5] * 20, max_tokens=1000)
    )
    (table_engine,) = gateway.gateway.table
    await until(lambda: received(table_engine) >= [3])
    await asyncio.to_thread(engine.kill)
    with pytest.raises(openai.APIError, match="no engine has taken over"):
        await task
    used = 100_000 - tenant.tokens.level
    assert 20 < used < 1020 if stream else used == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_request_that_kills_engines_is_abandoned(live: Any, scripted: Any, stream: bool) -> None:
    engines = [scripted() for _ in range(3)]
    for engine in engines:
        engine.does.fault, engine.does.cuts = "restart", tuple(range(2, 100))
    gateway = await live(*engines, max_resumes=2, **PATIENT)
    with pytest.raises(openai.APIError, match="lost by 3 engines"):
        await ask(gateway.client(), stream, max_tokens=100)
    assert sum(len(engine.requests) for engine in engines) == 3


@pytest.mark.parametrize(
    "other", [{"revision": "r2"}, {"model": "another"}], ids=["another revision", "another model"]
)
async def test_only_the_same_model_resumes_an_answer(live: Any, scripted: Any, other: dict[str, str]) -> None:
    """Another model or revision may have other weights, so it would continue the answer differently."""
    first, foreign = scripted(), scripted(**other)
    for engine in (first, foreign):
        engine.does.fault, engine.does.cuts = "error", (4,)
    gateway = await live(first, foreign, **PATIENT)
    for _ in range(6):
        answer = await ask(gateway.client(), True, max_tokens=10)
        assert answer["reason"] == "length"
    for engine in (first, foreign):
        begun = sum(not request.generated for request in engine.requests)
        assert sum(bool(request.generated) for request in engine.requests) == begun


async def test_draining_engine_hands_over_its_answers(live: Any, scripted: Any, until: Any) -> None:
    """At its drain deadline, an engine ends running requests with an error, and another resumes them."""
    old, new = scripted(), scripted()
    old.does.step_seconds = 0.02
    gateway = await live(old, max_resumes=1, **PATIENT)
    tasks = [asyncio.create_task(ask(gateway.client(), True, max_tokens=1500)) for _ in range(4)]
    (engine,) = gateway.gateway.table
    await until(lambda: old.running == 4 and received(engine) >= [2, 2, 2, 2])
    new.does.tokens_a_step = 100
    old.does.draining = True
    await until(lambda: engine.state == "draining")
    gateway.gateway.table.sync([engine.discovered, _found(new.endpoint)])
    await gateway.serving(1)
    old.does.fault, old.does.fault_after = "error", 0
    for answer in await asyncio.gather(*tasks):
        assert answer["ids"] == old.does.reply * 500
    assert len(new.requests) == 4
    text = gateway.gateway.metrics_text().decode()
    assert 'mizzen_gateway_resumes_total{cause="handover"} 4.0' in text
    assert engine.breaker.open_count == 0


def _found(endpoint: str) -> Any:
    from mizzen.gateway.engines.discovered_engine import DiscoveredEngine

    return DiscoveredEngine(name=endpoint, uid="", endpoint=endpoint)


async def test_disconnect_during_a_resume_leaves_nothing_behind(live: Any, scripted: Any, until: Any) -> None:
    engine = scripted()
    engine.does.step_seconds = 0.02
    gateway = await live(engine)
    async with (
        httpx.AsyncClient(timeout=60) as http,
        http.stream("POST", f"{gateway.url}/v1/completions", json=fields(True, max_tokens=500)) as response,
    ):
        await anext(response.aiter_bytes())
        await asyncio.to_thread(engine.kill)
        (table_engine,) = gateway.gateway.table
        await until(lambda: not table_engine.serving and not table_engine.requests)
    await until(lambda: gateway.gateway.admission.in_flight == 0 and not len(gateway.gateway.admission))


async def test_each_choice_resumes_independently(live: Any, scripted: Any, story: list[int]) -> None:
    engines = [scripted(), scripted()]
    for engine in engines:
        engine.does.reply, engine.does.end = story, story[-1]
    gateway = await live(*engines, **PATIENT)
    question = {"model": "demo", "messages": [{"role": "user", "content": "Tell me"}], "n": 3}

    async def story_of_choices() -> dict[int, str]:
        texts: dict[int, str] = {}
        async for chunk in await gateway.client().chat.completions.create(**question, stream=True):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        return texts

    calm = await story_of_choices()
    for engine in engines:
        engine.does.fault, engine.does.cuts = "error", (5,)
    assert await story_of_choices() == calm
    assert len(calm) == 3
    assert resumes(gateway) == 3


async def test_cached_output_is_not_counted_as_cached_prompt(live: Any, scripted: Any) -> None:
    """An engine that resumes an answer may have had part of the output in its cache."""
    engines = [scripted(), scripted()]
    for engine in engines:
        engine.does.cached_tokens = 1000
    gateway = await live(*engines, **PATIENT)
    answer = await ask(gateway.client(), True, max_tokens=5)
    details = answer["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] <= answer["usage"]["prompt_tokens"]
