# SPDX-License-Identifier: Apache-2.0
"""Bodies as well-known clients send them, with fields that do not change the answer.

The bodies have the form in which the clients send a second turn, that is, with the first answer in it.
"""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from mizzen.gateway.openai.openapi_document import REQUESTS

USER = {"role": "user", "content": "What is a mast?"}
CALL = {
    "id": "call_1", "type": "function", "index": 0,
    "function": {"name": "look_up", "arguments": '{"word": "mast"}', "parsed_arguments": {"word": "mast"}},
}  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "A pole."}
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}}
FUNCTION = {"name": "look_up", "parameters": SCHEMA}
BREAK = {"type": "ephemeral"}
CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "openai-python, parse() and stream()": (
        {"messages": [
            USER,
            {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
             "function_call": None, "parsed": None, "tool_calls": [CALL]},
            RESULT,
            {"role": "assistant", "content": '{"a": 1}', "parsed": {"a": 1}},
            USER,
        ]},
        "messages[].tool_calls[].function.parsed_arguments, messages[].parsed",
    ),
    "openai-agents (js)": (
        {"messages": [
            USER,
            {"role": "assistant", "content": [
                {"type": "text", "text": "A pole.", "role": "assistant", "annotations": [], "refusal": None},
            ]},
            USER,
        ]},
        "messages[].content[].role, messages[].content[].annotations",
    ),
    "litellm": (
        {"messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": BREAK}]},
            {**USER, "cache_control": BREAK},
            {"role": "user", "content": [
                {"type": "text", "text": "Go on.", "prompt_cache_breakpoint": {"mode": "explicit"}},
            ]},
         ],
         "tools": [{"type": "function", "function": FUNCTION, "cache_control": BREAK}]},
        "messages[].content[].cache_control, messages[].cache_control, "
        "messages[].content[].prompt_cache_breakpoint, tools[].cache_control",
    ),
    "options that advise": (
        {"messages": [USER], "verbosity": "low", "service_tier": "flex", "store": True,
         "prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"},
         "prediction": {"type": "content", "content": "A mast"}, "metadata": {"a": "b"},
         "safety_identifier": "me", "made_up": None, "thinking": None},
        "service_tier, store, metadata, verbosity, prediction, prompt_cache_options, prompt_cache_retention, "
        "safety_identifier",
    ),
    "neutral values": (
        {"messages": [USER], "verbosity": "medium", "service_tier": "auto", "store": False, "suffix": None,
         "made_up": None, "modalities": ["text"], "user": "me", "prompt_cache_key": "k"},
        "",
    ),
    "fields of other servers": (
        {"messages": [{**USER, "providerOptions": {}}], "thinking": {"type": "disabled"}, "made_up": 1},
        "thinking, made_up, messages[].providerOptions",
    ),
    "hosted tools": (
        {"messages": [USER], "tool_choice": "required",
         "tools": [{"type": "web_search", "search_context_size": "low"},
                   {"type": "function", "function": FUNCTION, "defer_loading": False}]},
        "tools[].search_context_size, tools[].defer_loading, tools[web_search]",
    ),
}  # fmt: skip


RESPONSES: dict[str, tuple[dict[str, Any], str]] = {
    "openai-python, responses.parse()": (
        {"input": [
            USER,
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
                {"type": "output_text", "text": '{"a": 1}', "annotations": [], "parsed": {"a": 1}},
            ]},
            {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look_up",
             "arguments": '{"word": "mast"}', "status": "completed", "parsed_arguments": {"word": "mast"}},
            {"type": "function_call_output", "call_id": "call_1", "output": "A pole."},
         ],
         "tools": [{"type": "function", **FUNCTION}]},
        "input[].parsed_arguments, input[].content[].parsed",
    ),
    "options that advise": (
        {"input": "a", "truncation": "auto", "max_tool_calls": 3, "service_tier": "flex",
         "reasoning": {"summary": "auto"}, "text": {"verbosity": "low"}},
        "service_tier, max_tool_calls, truncation, text.verbosity",
    ),
}  # fmt: skip


def without_order(header: str) -> set[str]:
    return set(header.split(", ")) - {""}


@pytest.fixture
def engine(scripted: Any) -> Any:
    return scripted()


@pytest.mark.parametrize("stream", [False, True])
async def test_chats_of_clients_are_served(live: Any, engine: Any, stream: bool) -> None:
    gateway = await live(engine, tool_parser="hermes", reasoning_parser="none")
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        for name, (body, ignored) in CHATS.items():
            sent = {"model": "demo", "max_tokens": 2, "stream": stream, **body}
            answer = await http.post("/v1/chat/completions", json=sent)
            assert answer.status_code == 200, (name, answer.text)
            assert '"error"' not in answer.text, name
            header = answer.headers.get("x-mizzen-ignored", "")
            assert without_order(header) == without_order(ignored), name


async def test_responses_of_clients_are_served(live: Any, engine: Any) -> None:
    gateway = await live(engine, tool_parser="hermes", reasoning_parser="none")
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        for name, (body, ignored) in RESPONSES.items():
            sent = {"model": "demo", "max_output_tokens": 2, **body}
            answer = await http.post("/v1/responses", json=sent)
            assert answer.status_code == 200, (name, answer.text)
            header = answer.headers.get("x-mizzen-ignored", "")
            assert without_order(header) == without_order(ignored), name


async def test_ignored_fields_are_counted(live: Any, engine: Any) -> None:
    gateway = await live(engine)
    body = {"model": "demo", "max_tokens": 1, "store": True, "made_up": 1, "also_made_up": 1}
    async with httpx.AsyncClient(timeout=60) as http:
        for message in (USER, {**USER, "cache_control": BREAK}):
            sent = {**body, "messages": [message, message]}
            assert (await http.post(f"{gateway.url}/v1/chat/completions", json=sent)).status_code == 200
        text = (await http.get(f"{gateway.admin}/metrics")).text
    counts = dict(
        re.findall(r'^mizzen_gateway_ignored_fields_total\{field="(\w+)"\} (\S+)$', text, re.MULTILINE)
    )
    assert counts == {"store": "2.0", "cache_control": "1.0", "other": "2.0"}


OTHERS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": [USER], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/pooling": {"input": "a"},
    "/v2/embed": {"texts": ["a"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 1},
}
"""A small body for each endpoint that any model serves."""
SPECIAL: dict[str, dict[str, Any]] = {
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/classify": {"input": "a"},
    "/v1/moderations": {"input": "a"},
}
"""A small body for each other endpoint; models that generate text refuse it."""


def test_every_endpoint_ignores_unknown_fields(simulated_url: str) -> None:
    assert len(OTHERS) + len(SPECIAL) == len(REQUESTS)
    for path, fields in OTHERS.items():
        body = {"model": "demo", **fields}
        answer = httpx.post(f"{simulated_url}{path}", json={**body, "made_up": {"a": 1}}, timeout=60)
        assert answer.status_code == 200, (path, answer.text)
        assert answer.headers["x-mizzen-ignored"] == "made_up"
        answer = httpx.post(f"{simulated_url}{path}", json={**body, "made_up": None}, timeout=60)
        assert answer.status_code == 200, (path, answer.text)
        assert "x-mizzen-ignored" not in answer.headers


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"audio": {"voice": "a"}}, "audio"),
    ("/v1/chat/completions", {"modalities": ["text", "audio"]}, "modalities"),
    ("/v1/chat/completions", {"web_search_options": {}}, "web_search_options"),
    ("/v1/chat/completions", {"documents": [{"text": "a"}]}, "documents"),
    ("/v1/chat/completions", {"max_output_tokens": 5}, "max_output_tokens"),
    ("/v1/chat/completions", {"cache_salt": "a"}, "cache_salt"),
    ("/v1/chat/completions", {"service_tier": 5}, "service_tier"),
    ("/v1/chat/completions", {"made_up": 1, "verbosity": ["low"]}, "verbosity"),
    ("/v1/chat/completions", {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ("/v1/completions", {"suffix": "a"}, "suffix"),
    ("/v1/completions", {"max_completion_tokens": 5}, "max_completion_tokens"),
    ("/v1/completions", {"prompt_logprobs": 1}, "prompt_logprobs"),
    ("/v1/responses", {"max_tokens": 5}, "max_tokens"),
    ("/v1/responses", {"response_format": {"type": "json_object"}}, "response_format"),
    ("/v1/responses", {"truncation": "sometimes"}, "truncation"),
    ("/v1/embeddings", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
]
STRICT: list[tuple[str, dict[str, Any], str]] = [
    *(("/v1/chat/completions", {name: value}, name) for name, value in [
        ("store", True), ("service_tier", "flex"), ("verbosity", "low"), ("prompt_cache_retention", "24h"),
        ("made_up", 1), ("made_up", None), ("prediction", {})]),
    ("/v1/chat/completions", {"messages": [{**USER, "parsed": 1}]}, "messages[0].parsed"),
    ("/v1/chat/completions", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ("/v1/chat/completions", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": {**FUNCTION, "x": 1}}]},
     "tools[0].function.x"),
    ("/v1/completions", {"messages": [USER]}, "messages"),
    *(("/v1/responses", {name: value}, name) for name, value in [
        ("store", True), ("truncation", "auto"), ("max_tool_calls", 1), ("made_up", 1),
        ("client_metadata", {"a": "b"})]),
    ("/v1/responses", {"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ("/v1/responses", {"text": {"verbosity": "high"}}, "text.verbosity"),
    ("/v1/responses", {"include": ["web_search_call.action.sources"]}, "include[0]"),
    ("/v1/responses", {"input": [{**USER, "extra": 1}]}, "input[0].extra"),
    ("/v1/responses", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("/v1/responses", {"tools": [{"type": "namespace", "name": "a", "tools": []}]}, "tools[0].type"),
]  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
async def test_refused_fields_are_named(live: Any, engine: Any, strict: bool) -> None:
    gateway = await live(engine, strict_fields=strict)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        for path, change, param in STRICT if strict else REFUSED:
            answer = await http.post(path, json={"model": "demo", **OTHERS[path], **change})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (
                change,
                answer.text,
            )
        for path in OTHERS:
            answer = await http.post(path, json={"model": "demo", **OTHERS[path], "made_up": 1})
            assert (answer.status_code == 400 and "made_up" in answer.text) == strict, (path, answer.text)
        for path, fields in SPECIAL.items():
            answer = await http.post(path, json={"model": "demo", **fields, "made_up": 1})
            assert (answer.status_code, "made_up" in answer.text) == (400, strict), (path, answer.text)
        nulls = {"model": "demo", "input": [{**USER, "extra": None}]}
        assert (await http.post("/v1/responses", json=nulls)).status_code == 200


class Word(BaseModel):
    """Answer of `parse()`."""

    value: int


async def test_parsed_message_of_the_client_can_be_sent_back(
    live: Any, scripted: Any, tokenizer: Any
) -> None:
    """`parse()` of OpenAI's client adds `parsed` to the message; many programs send the message back."""
    engine = scripted()
    engine.does.end = tokenizer.token_id("<|im_end|>")
    engine.does.reply = [*tokenizer.encode('{"value": 3}', add_special_tokens=False), engine.does.end]
    gateway = await live(engine)
    client = gateway.client()
    history: list[Any] = [USER]
    for _ in range(2):
        answer = await client.chat.completions.parse(model="demo", messages=history, response_format=Word)
        assert answer.choices[0].message.parsed == Word(value=3)
        history += [answer.choices[0].message.model_dump(warnings=False), USER]
    raw = await client.chat.completions.with_raw_response.create(model="demo", messages=history)
    assert raw.headers["x-mizzen-ignored"] == "messages[].parsed"
