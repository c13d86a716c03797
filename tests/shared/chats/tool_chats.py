# SPDX-License-Identifier: Apache-2.0
"""Chats with tools, and the requests that engines get for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

USER: list[Any] = [{"role": "user", "content": "What is the weather?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather.", "parameters": CITY},
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
ARGUMENTS = '{"city": "Köln"}'

Model = Callable[..., Any]
ANSWERS = {
    "qwen25": f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama31": f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "mistral_tools": f'Let me see.[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]',
}
"""Model output that calls the weather tool, by name of the template."""


def request_prompt(engine: Any) -> str:
    ids = np.frombuffer(engine.requests[-1].prompt, "<i4").tolist()
    return engine.tokenizer.decode(ids, skip_special_tokens=False)


def request_grammar(engine: Any) -> dict[str, Any] | None:
    grammar = engine.requests[-1].sampling.grammar
    if grammar is None:
        return None
    kind, text = grammar
    assert kind == "structural_tag"
    return json.loads(text)["format"]


async def chat(gateway: Any, stream: bool, **options: Any) -> dict[str, Any]:
    """Run a chat, streamed if `stream` is set; return its message, finish reason and usage."""
    options = {"model": "demo", "messages": USER, **options}
    client = gateway.client()
    if not stream:
        answer = await client.chat.completions.create(**options)
        choice = answer.choices[0]
        result = choice.message.model_dump(exclude_none=True)
        result["tool_calls"] = [
            (call["function"]["name"], call["function"]["arguments"]) for call in result.get("tool_calls", ())
        ]
        return {**result, "reason": choice.finish_reason, "usage": answer.usage}
    result = {"content": "", "reasoning_content": "", "calls": []}
    chunks = await client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **options
    )
    async for chunk in chunks:
        if chunk.usage is not None:
            result["usage"] = chunk.usage
        for choice in chunk.choices:
            result["reason"] = choice.finish_reason or result.get("reason")
            result["content"] += choice.delta.content or ""
            result["reasoning_content"] += (choice.delta.model_extra or {}).get("reasoning_content") or ""
            merge_calls(result["calls"], choice.delta.tool_calls or [])
    return {**result, "tool_calls": [(call["name"], call["arguments"]) for call in result["calls"]]}


def merge_calls(calls: list[dict[str, str]], deltas: list[Any]) -> None:
    """Merge a chunk's tool calls into `calls`.

    The first delta of a call has its id and name; later deltas have its index and parts of its arguments.
    """
    for delta in deltas:
        if delta.id is not None:
            assert delta.index == len(calls)
            assert delta.type == "function"
            assert delta.function.arguments == ""
            calls.append({"id": delta.id, "name": delta.function.name, "arguments": ""})
        else:
            assert delta.function.name is None
            calls[delta.index]["arguments"] += delta.function.arguments
