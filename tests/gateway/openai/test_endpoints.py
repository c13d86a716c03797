# SPDX-License-Identifier: Apache-2.0
"""Tests of all endpoints: the official OpenAI client, a real gateway and a scripted engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from mizzen.gateway.text.tokenizer import Tokenizer

USER: list[Any] = [{"role": "user", "content": "What is a mast?"}]
TEXT = "A mast holds the sails. Maße 世界 🙂 naïve end"


@pytest.fixture
def engine(scripted: Any, tokenizer: Tokenizer) -> Any:
    """Return an engine that answers TEXT followed by an end token."""
    started = scripted()
    end = tokenizer.token_id("<|im_end|>")
    started.does.reply = [*tokenizer.encode(TEXT, add_special_tokens=False), end]
    started.does.end = end
    started.does.cached_tokens = 3
    return started


async def test_chat_answers_and_counts_tokens(live: Any, engine: Any, tokenizer: Tokenizer) -> None:
    gateway = await live(engine)
    answer = await gateway.client().chat.completions.create(
        model="demo", messages=USER, temperature=0.5, seed=7, top_p=0.9, extra_body={"top_k": 5, "min_p": 0.1}
    )
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason, choice.message.role) == (TEXT, "stop", "assistant")
    sent = engine.requests[0]
    prompt = np.frombuffer(sent.prompt, "<i4").tolist()
    assert tokenizer.decode(prompt, skip_special_tokens=False) == (
        "<s><|im_start|>user\nWhat is a mast?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.count(tokenizer.token_id("<s>")) == 1
    sampling = sent.sampling
    assert (sampling.temperature, sampling.seed, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.5,
        7,
        0.9,
        5,
        0.1,
    )
    assert sampling.max_tokens is None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(engine.does.reply)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("tokens_a_step", [1, 3, 100])
async def test_chat_stream_joins_to_the_answer(live: Any, engine: Any, tokens_a_step: int) -> None:
    engine.does.tokens_a_step = tokens_a_step
    gateway = await live(engine)
    stream = await gateway.client().chat.completions.create(
        model="demo",
        messages=USER,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(engine.does.reply)
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 3
    assert all(chunk.usage is None for chunk in chunks[:-1])
    ids = [i for c in chunks if c.choices for i in (c.choices[0].model_extra or {}).get("token_ids", [])]
    assert ids == engine.does.reply
    assert len({chunk.id for chunk in chunks}) == 1
    assert not any("�" in (c.choices[0].delta.content or "") for c in chunks if c.choices)


async def test_synchronous_client_works(live: Any, engine: Any) -> None:
    gateway = await live(engine)

    def ask() -> str:
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0)
        with client.chat.completions.create(model="demo", messages=USER, stream=True) as stream:
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(ask) == TEXT


async def test_completions_answer_and_count_tokens(live: Any, engine: Any, tokenizer: Tokenizer) -> None:
    gateway = await live(engine)
    client = gateway.client()
    answer = await client.completions.create(model="demo", prompt="Mast", max_tokens=4)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text == tokenizer.decode(engine.does.reply[:4])
    prompt = np.frombuffer(engine.requests[0].prompt, "<i4").tolist()
    assert prompt == tokenizer.encode("Mast")
    assert prompt[0] == tokenizer.token_id("<s>")
    await client.completions.create(model="demo", prompt=[5, 6, 7])
    assert np.frombuffer(engine.requests[1].prompt, "<i4").tolist() == [5, 6, 7]
    assert engine.requests[1].sampling.max_tokens == 16
    stream = await client.completions.create(model="demo", prompt=["Mast"], stream=True, max_tokens=200)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_the_answer_and_aborts_the_engine(
    live: Any, engine: Any, until: Any, stream: bool
) -> None:
    engine.does.step_seconds = 0.005
    gateway = await live(engine)
    options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await gateway.client().chat.completions.create(
        model="demo", messages=USER, stop=["the sa", "zzz"], **options
    )
    if stream:
        chunks = [chunk async for chunk in answer]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        reason, usage = [c.choices[0].finish_reason for c in chunks if c.choices][-1], chunks[-1].usage
    else:
        text, reason, usage = answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage
    assert (text, reason) == ("A mast holds ", "stop")
    assert usage.completion_tokens < len(engine.does.reply)
    assert usage.prompt_tokens_details.cached_tokens == 3
    await until(lambda: engine.aborts)
    assert engine.aborts == [engine.requests[0].rid]


async def test_stop_token_is_not_in_the_text(live: Any, engine: Any, tokenizer: Tokenizer) -> None:
    end = tokenizer.encode("end", add_special_tokens=False)[-1]
    engine.does.reply, engine.does.end = [*tokenizer.encode("ab", add_special_tokens=False), end], end
    gateway = await live(engine)
    answer = await gateway.client().chat.completions.create(
        model="demo", messages=USER, extra_body={"stop_token_ids": [end], "ignore_eos": True}
    )
    assert answer.choices[0].message.content == "ab"
    assert engine.requests[0].sampling.stop_token_ids == (end,)
    assert engine.requests[0].sampling.ignore_eos


async def test_models_and_aliases_are_listed(live: Any, engine: Any) -> None:
    gateway = await live(engine, alias=("nick", "org/name"))
    client = gateway.client()
    assert [model.id async for model in await client.models.list()] == ["demo", "nick", "org/name"]
    assert (await client.models.retrieve("org/name")).id == "org/name"
    answer = await client.chat.completions.create(model="nick", messages=USER)
    assert answer.model == "nick"
    with pytest.raises(openai.NotFoundError) as error:
        await client.chat.completions.create(model="other", messages=USER)
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_all_errors_have_the_same_shape(live: Any, engine: Any) -> None:
    gateway = await live(engine, max_body_bytes=2048)
    async with httpx.AsyncClient(timeout=60) as http:
        large = await http.post(f"{gateway.url}/v1/completions", content=b"x" * 3000)
        parts = await http.post(f"{gateway.url}/v1/completions", content=split_chunks(b"x" * 500, 6))
        nowhere = await http.get(f"{gateway.url}/v1/nothing")
        method = await http.put(f"{gateway.url}/v1/completions")
    statuses = [response.status_code for response in (large, parts, nowhere, method)]
    assert statuses == [413, 413, 404, 405]
    for response in (large, parts, nowhere, method):
        assert response.json()["error"]["message"]


async def split_chunks(content: bytes, count: int) -> Any:
    for _ in range(count):
        yield content


async def test_request_id_is_echoed_or_generated(live: Any, engine: Any) -> None:
    gateway = await live(engine)
    async with httpx.AsyncClient(timeout=60) as http:
        url = f"{gateway.url}/v1/models"
        assert (await http.get(url, headers={"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
        generated = (await http.get(url, headers={"x-request-id": "x" * 500})).headers["x-request-id"]
        assert generated.startswith("req-")
        assert (await http.get(f"{gateway.url}/openapi.json")).json()["paths"]["/v1/chat/completions"]


async def test_template_rejection_is_400(live: Any, scripted: Any, tokenizer_files: dict[str, bytes]) -> None:
    files = {**tokenizer_files, "chat_template.jinja": b"{{ raise_exception('roles must alternate') }}"}
    gateway = await live(scripted(files))
    with pytest.raises(openai.BadRequestError, match="roles must alternate"):
        await gateway.client().chat.completions.create(model="demo", messages=USER)
    bare = {"tokenizer.json": tokenizer_files["tokenizer.json"]}
    gateway = await live(scripted(bare))
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        await gateway.client().chat.completions.create(model="demo", messages=USER)
    await gateway.client().completions.create(model="demo", prompt="a")


async def test_disconnect_aborts_in_the_engine(live: Any, engine: Any, until: Any) -> None:
    engine.does.reply, engine.does.end = [10, 11, 12], None
    engine.does.step_seconds = 0.01
    gateway = await live(engine)
    client = gateway.client()
    stream = await client.chat.completions.create(model="demo", messages=USER, stream=True)
    await anext(aiter(stream))
    await stream.close()
    full = asyncio.create_task(client.chat.completions.create(model="demo", messages=USER))
    await until(lambda: len(engine.requests) == 2)
    full.cancel()
    await until(lambda: not engine.running and len(engine.aborts) == 2)
    assert sorted(engine.aborts) == sorted(request.rid for request in engine.requests)
    await until(lambda: not gateway.gateway.admission.in_flight)
    assert all(entry.requests == 0 and entry.tokens_in_flight == 0 for entry in gateway.gateway.table)


async def test_many_concurrent_streams_are_complete(live: Any, engine: Any) -> None:
    gateway = await live(engine)
    client = gateway.client()

    async def stream_text() -> str:
        stream = await client.chat.completions.create(model="demo", messages=USER, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert await asyncio.gather(*(stream_text() for _ in range(60))) == [TEXT] * 60


def test_importing_the_app_does_not_import_torch() -> None:
    modules = "mizzen.gateway.app, mizzen.gateway.main, mizzen.gateway.engines.engine_pods"
    program = f"import sys, {modules}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
