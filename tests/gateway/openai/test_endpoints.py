"""The official OpenAI client against a real gateway and a scripted engine."""

from __future__ import annotations

import asyncio
import json
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


async def test_defaults_of_unsupported_fields_are_accepted(live: Any, engine: Any) -> None:
    gateway = await live(engine)
    body = {
        "model": "demo",
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                "name": "x",
            },
            {"role": "assistant", "content": "c", "tool_calls": [], "refusal": None},
            {"role": "user", "content": "d"},
        ],
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "logprobs": False,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "logit_bias": {},
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "stream": False,
        "stream_options": None,
        "stop": None,
        "seed": None,
        "service_tier": "auto",
        "max_completion_tokens": 2,
    }
    async with httpx.AsyncClient(timeout=60) as http:
        response = await http.post(f"{gateway.url}/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["finish_reason"] == "length"


CHAT = {"model": "demo", "messages": USER}
BAD: list[tuple[Any, str, str | None]] = [
    (b"", "the body is empty", None),
    (b" \n", "the body is empty", None),
    (b"{", "not valid JSON", None),
    (b"\xff\xfe", "not UTF-8: invalid start byte at byte 0", None),
    (b'{"model": "demo", "messages": "\xe4\xb8', "not UTF-8: unexpected end of data at byte 31", None),
    (b'\xef\xbb\xbf{"model": "demo"}', "byte order mark", None),
    (b'{"model": "demo", "messages": [{"content": "a\\ud800"}]}', "unpaired", "messages[0].content"),
    (b'{"model": "demo", "stop": ["\\udc00"]}', "\\udc00", "stop[0]"),
    (b'{"model": "demo", "user": "\\ud800\\u0041"}', "unpaired", "user"),
    (b'{"metadata": {"\\ud800": NaN}}', "a character", "metadata"),
    (b'{"model": "demo", "temperature": NaN}', "NaN", "temperature"),
    (b'{"tools": [{"function": {"parameters": {"a": [-Infinity]}}}]}', "NaN and Infinity", None),
    (b'{"model": "demo", "temperature": 1e999}', "out of range", "temperature"),
    (b"[" * 100_000, "JSON", None),
    ([], "must be a JSON object", None),
    ({}, "model is required", "model"),
    ({"model": "demo"}, "messages is required", "messages"),
    ({"model": 3, "messages": USER}, "model: expected `str`", "model"),
    ({**CHAT, "messages": []}, "at least one", "messages"),
    ({**CHAT, "messages": "hi"}, "messages: expected `array`", "messages"),
    ({**CHAT, "messages": [{"role": "user"}]}, "content is required", "messages[0].content"),
    (
        {**CHAT, "messages": [{"role": "king", "content": "x"}]},
        "it must be assistant, developer, function, system, tool or user",
        "messages[0].role",
    ),
    (
        {**CHAT, "response_format": {"type": "xml"}},
        "json_object, json_schema, regex, structural_tag or text",
        "response_format.type",
    ),
    ({**CHAT, "tool_choice": "must"}, "it must be auto, none or required", "tool_choice"),
    ({**CHAT, "tool_choice": {"type": "x"}}, "it must be function or allowed_tools", "tool_choice.type"),
    ({**CHAT, "tools": [{"type": "web_search"}]}, "it must be function", "tools[0].type"),
    ({**CHAT, "messages": [{"role": 3, "content": "x"}]}, "role", "messages[0].role"),
    ({**CHAT, "messages": [{"content": "x"}]}, "role is required", "messages[0].role"),
    (
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "image_url parts are not supported",
        "messages[0].content[0].type",
    ),
    (
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "video", "text": "x"}]}]},
        "only parts of type text",
        "messages[0].content[0].type",
    ),
    (
        {**CHAT, "messages": [*USER, {"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "function is required",
        "messages[1].tool_calls[0].function",
    ),
    (
        {**CHAT, "messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]},
        "only a tool's message",
        "messages[0].tool_call_id",
    ),
    ({**CHAT, "temperature": "warm"}, "temperature: expected", "temperature"),
    ({**CHAT, "temperature": -1}, "temperature must be", "temperature"),
    ({**CHAT, "temperature": 2.5}, "temperature must be", "temperature"),
    ({**CHAT, "top_p": 1.1}, "top_p must be at most 1", "top_p"),
    ({**CHAT, "min_p": 2}, "min_p must be", "min_p"),
    ({**CHAT, "top_k": -2}, "top_k must be", "top_k"),
    ({**CHAT, "max_tokens": 0}, "max_tokens must be", "max_tokens"),
    ({**CHAT, "max_tokens": 1.5}, "max_tokens: expected", "max_tokens"),
    ({**CHAT, "n": 129.0}, "at most 128", "n"),
    ({**CHAT, "seed": 1e300}, "64-bit", "seed"),
    ({**CHAT, "x" * 60_000: 1}, "is not a field", None),
    ({**CHAT, "tool_choice": "x" * 60_000}, "it must be auto, none or required", "tool_choice"),
    ({**CHAT, "max_tokens": True}, "max_tokens: expected", "max_tokens"),
    ({**CHAT, "max_tokens": 1, "max_completion_tokens": 2}, "differ", "max_completion_tokens"),
    ({**CHAT, "seed": 2**70}, "seed", "seed"),
    ({**CHAT, "stop": ""}, "stop string", "stop"),
    ({**CHAT, "stop": ["a"] * 17}, "at most 16", "stop"),
    ({**CHAT, "stop": [3]}, "stop[", "stop[0]"),
    ({**CHAT, "stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids[0]"),
    ({**CHAT, "stream": "yes"}, "stream: expected `bool", "stream"),
    ({**CHAT, "stream_options": {"include_usage": True}}, "stream_options", "stream_options"),
    ({**CHAT, "stream": True, "stream_options": {"x": 1}}, "stream_options.x", "stream_options.x"),
    ({**CHAT, "n": 0}, "n must be at least 1", "n"),
    ({**CHAT, "n": 129}, "n must be at most 128", "n"),
    ({**CHAT, "n": True}, "n: expected `int", "n"),
    ({**CHAT, "tools": [{"type": "function"}]}, "function is required", "tools[0].function"),
    ({**CHAT, "logprobs": 3}, "logprobs: expected `bool", "logprobs"),
    ({**CHAT, "top_logprobs": 3}, "needs logprobs", "top_logprobs"),
    ({**CHAT, "logprobs": True, "top_logprobs": 21}, "must be at most 20", "top_logprobs"),
    ({**CHAT, "presence_penalty": 2.5}, "presence_penalty must be at most 2", "presence_penalty"),
    ({**CHAT, "frequency_penalty": -3}, "frequency_penalty must be", "frequency_penalty"),
    ({**CHAT, "repetition_penalty": 0}, "repetition_penalty must be at least 0.01", "repetition_penalty"),
    ({**CHAT, "logit_bias": {"x": 1}}, "no token id", "logit_bias"),
    ({**CHAT, "logit_bias": {"1": 101}}, "must be at most 100", "logit_bias"),
    ({**CHAT, "logit_bias": {str(i): 1 for i in range(1025)}}, "more than 1024", "logit_bias"),
    ({**CHAT, "min_tokens": 5, "max_tokens": 4}, "at most max_tokens", "min_tokens"),
    ({**CHAT, "response_format": {"type": "xml"}}, "response_format.type", "response_format.type"),
    ({**CHAT, "response_format": {"type": "json_schema"}}, "is required", "response_format.json_schema"),
    ({**CHAT, "response_format": {"type": "text", "regex": "a"}}, "belong", "response_format.regex"),
    (
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "schema is required",
        "response_format.json_schema.schema",
    ),
    ({**CHAT, "regex": "a", "ebnf": "b"}, "both constrain", "ebnf"),
    ({**CHAT, "guided_json": "{"}, "not valid JSON", "guided_json"),
    ({**CHAT, "guided_choice": []}, "not empty", "guided_choice"),
    ({**CHAT, "structured_outputs": {"regex": ""}}, "is empty", "structured_outputs.regex"),
    ({**CHAT, "audio": {"voice": "x"}}, "audio is not supported", "audio"),
    ({**CHAT, "store": True}, "store is not supported", "store"),
    ({**CHAT, "functions": [{"name": "f"}]}, "functions is not supported", "functions"),
    (
        {**CHAT, "continue_final_message": True, "add_generation_prompt": True},
        "needs add_generation_prompt: false",
        "continue_final_message",
    ),
    ({**CHAT, "chat_template_kwargs": {"messages": []}}, "no variable", "chat_template_kwargs.messages"),
    ({**CHAT, "made_up": 1}, "made_up is not a field", "made_up"),
    ({**CHAT, "max_tokens": 5000}, "context length is 2048", "messages"),
    (
        {"model": "demo", "messages": [{"role": "user", "content": "x\u00e9" * 3000}]},
        "in the prompt",
        "messages",
    ),
]


async def test_invalid_chat_requests_get_400_naming_the_field(live: Any, engine: Any) -> None:
    gateway = await live(engine)
    async with httpx.AsyncClient(timeout=60) as http:
        for body, message, param in BAD:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            response = await http.post(f"{gateway.url}/v1/chat/completions", content=content)
            assert response.status_code == 400, (content[:200], response.text)
            error = response.json()["error"]
            assert message in error["message"], content[:200]
            assert error["type"] == "invalid_request_error"
            assert len(error["message"]) < 1000
            assert param is None or error["param"] == param, (content[:200], error)
            assert set(error) == {"message", "type", "param", "code"}
            assert response.headers["x-request-id"]
    assert not engine.requests


async def test_integers_may_be_written_as_floats(live: Any, engine: Any) -> None:
    """Some languages have only floats and write 3.0."""
    gateway = await live(engine)
    common: dict[str, Any] = {"max_tokens": 3.0, "n": 1.0, "seed": 5.0, "top_k": 4e0, "stop_token_ids": [7.0]}
    bodies = {
        "chat/completions": {"messages": USER, "logprobs": True, "top_logprobs": 2.0},
        "completions": {"prompt": [1.0, 2], "logprobs": 2.0, "echo": False},
    }
    async with httpx.AsyncClient(timeout=60) as http:
        for path, body in bodies.items():
            sent = {"model": "demo", **common, **body}
            response = await http.post(f"{gateway.url}/v1/{path}", json=sent)
            assert response.status_code == 200, response.text
            sampling = engine.requests[-1].sampling
            assert (sampling.max_tokens, sampling.seed, sampling.top_k) == (3, 5, 4)
            assert (sampling.stop_token_ids, sampling.logprobs) == ((7,), 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_zero_generates_nothing(live: Any, engine: Any, stream: bool) -> None:
    gateway = await live(engine)
    options: dict[str, Any] = {"model": "demo", "prompt": ["A mast", "A sail"], "max_tokens": 0}
    client = gateway.client()
    if stream:
        usage = {"include_usage": True}
        chunks = [
            chunk
            async for chunk in await client.completions.create(
                stream=True, stream_options=usage, echo=True, **options
            )
        ]
        texts = {0: "", 1: ""}
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            texts[choice.index] += choice.text
        assert texts == {0: "A mast", 1: "A sail"}
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 0
        return
    answer = await client.completions.create(**options)
    assert [(one.text, one.finish_reason) for one in answer.choices] == [("", "length")] * 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    assert answer.usage.prompt_tokens > 0


BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": []}, "empty", "prompt"),
    ({"prompt": ["a", 3]}, "list of either", "prompt"),
    ({"prompt": [1, "a"]}, "list of either", "prompt"),
    ({"prompt": [["a"]]}, "list of either", "prompt"),
    ({"prompt": [[1], []]}, "empty", "prompt"),
    ({"prompt": [-1]}, "token id", "prompt"),
    ({"prompt": [2**31]}, "token id", "prompt"),
    ({"prompt": [True]}, "list of either", "prompt"),
    ({"prompt": ["a"] * 1025}, "more than 1024 sequences", "prompt"),
    ({"prompt": 3}, "prompt: expected", "prompt"),
    ({"prompt": ["a"] * 9, "n": 128}, "more than 1024 sequences", "n"),
    ({"prompt": ["a"] * 9, "best_of": 128}, "more than 1024 sequences", "best_of"),
    ({"best_of": 2, "n": 3}, "at least n", "best_of"),
    ({"best_of": 2, "stream": True}, "cannot be streamed", "best_of"),
    ({"suffix": "b"}, "suffix is not supported", "suffix"),
    ({"logprobs": True}, "must be a number", "logprobs"),
    ({"logprobs": 21}, "must be at most 20", "logprobs"),
    ({"max_tokens": -1}, "must be at least 0", "max_tokens"),
    ({"prompt": [1.5]}, "list of either", "prompt"),
    ({"prompt": [2.0**31]}, "token id", "prompt"),
    ({"max_tokens": 3000}, "context length is 2048", "prompt"),
    ({"messages": USER}, "messages is not a field", "messages"),
]


async def test_invalid_completions_get_400_naming_the_field(live: Any, engine: Any) -> None:
    gateway = await live(engine)
    async with httpx.AsyncClient(timeout=60) as http:
        for change, message, param in BAD_COMPLETIONS:
            body = {"model": "demo", "prompt": "a", **change}
            response = await http.post(f"{gateway.url}/v1/completions", json=body)
            assert response.status_code == 400, (change, response.text)
            error = response.json()["error"]
            assert message in error["message"]
            assert error["param"] == param, (change, error)
    assert not engine.requests


async def test_values_that_request_nothing_are_accepted(live: Any, engine: Any) -> None:
    gateway = await live(engine)
    both = {"model": "demo", "n": 1, "logprobs": False, "logit_bias": {}, "stop": None, "user": "me"}
    async with httpx.AsyncClient(timeout=60) as http:
        chat = {**both, "messages": USER, "top_logprobs": 0, "modalities": ["text"], "echo": False}
        response = await http.post(f"{gateway.url}/v1/chat/completions", json=chat)
        assert response.status_code == 200, response.text
        plain = {**both, "prompt": "a", "suffix": None, "best_of": 1, "echo": False}
        response = await http.post(f"{gateway.url}/v1/completions", json=plain)
        assert response.status_code == 200, response.text
    assert [request.sampling.logprobs for request in engine.requests] == [None, None]


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


async def split_chunks(part: bytes, count: int) -> Any:
    for _ in range(count):
        yield part


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
    assert all(one.requests == 0 and one.tokens == 0 for one in gateway.gateway.table)


async def test_many_concurrent_streams_are_complete(live: Any, engine: Any) -> None:
    gateway = await live(engine)
    client = gateway.client()

    async def one() -> str:
        stream = await client.chat.completions.create(model="demo", messages=USER, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert await asyncio.gather(*(one() for _ in range(60))) == [TEXT] * 60


def test_importing_the_app_does_not_import_torch() -> None:
    modules = "mizzen.gateway.app, mizzen.gateway.main, mizzen.gateway.engines.engine_pods"
    program = f"import sys, {modules}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
