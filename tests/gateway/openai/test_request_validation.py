# SPDX-License-Identifier: Apache-2.0
"""Validation of chat and completion requests over HTTP: accepted defaults, and 400s that name the field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

USER: list[Any] = [{"role": "user", "content": "What is a mast?"}]


@pytest.fixture
def engine(scripted: Any) -> Any:
    return scripted()


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
    ({**CHAT, "tools": [{"type": "custom"}]}, "only function tools", "tools[0].type"),
    ({**CHAT, "messages": [{"role": 3, "content": "x"}]}, "role", "messages[0].role"),
    ({**CHAT, "messages": [{"content": "x"}]}, "role is required", "messages[0].role"),
    (
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].image_url.url is required",
        "messages[0].content[0].image_url.url",
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
        "only a tool message",
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
    ({**CHAT, "logit_bias": {"x": 1}}, "not a token id", "logit_bias"),
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
    ({**CHAT, "guided_choice": []}, "non-empty", "guided_choice"),
    ({**CHAT, "structured_outputs": {"regex": ""}}, "is empty", "structured_outputs.regex"),
    ({**CHAT, "audio": {"voice": "x"}}, "audio is not supported", "audio"),
    ({**CHAT, "store": "yes"}, "store: expected `bool", "store"),
    ({**CHAT, "functions": [{"name": "f"}]}, "functions is not supported", "functions"),
    (
        {**CHAT, "continue_final_message": True, "add_generation_prompt": True},
        "needs add_generation_prompt: false",
        "continue_final_message",
    ),
    (
        {**CHAT, "chat_template_kwargs": {"messages": []}},
        "not a template variable",
        "chat_template_kwargs.messages",
    ),
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
    """Clients in languages that have only floats write 3.0 instead of 3."""
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
    assert [(empty.text, empty.finish_reason) for empty in answer.choices] == [("", "length")] * 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    assert answer.usage.prompt_tokens > 0


BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": []}, "empty", "prompt"),
    ({"prompt": ["a", 3]}, "list of either", "prompt"),
    ({"prompt": [1, "a"]}, "list of either", "prompt"),
    ({"prompt": [["a"]]}, "list of either", "prompt[0]"),
    ({"prompt": [[1], []]}, "empty", "prompt[1]"),
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
    ({"messages": USER}, "messages is not supported: use /v1/chat", "messages"),
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
    bodies = {"model": "demo", "n": 1, "logprobs": False, "logit_bias": {}, "stop": None, "user": "me"}
    async with httpx.AsyncClient(timeout=60) as http:
        chat = {**bodies, "messages": USER, "top_logprobs": 0, "modalities": ["text"], "echo": False}
        response = await http.post(f"{gateway.url}/v1/chat/completions", json=chat)
        assert response.status_code == 200, response.text
        plain = {**bodies, "prompt": "a", "suffix": None, "best_of": 1, "echo": False}
        response = await http.post(f"{gateway.url}/v1/completions", json=plain)
        assert response.status_code == 200, response.text
    assert [request.sampling.logprobs for request in engine.requests] == [None, None]
