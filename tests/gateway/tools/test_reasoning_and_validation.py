# SPDX-License-Identifier: Apache-2.0
"""Requests of the official OpenAI client: reasoning over HTTP, and invalid tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tool_chats import (
    ARGUMENTS,
    TOOLS,
    USER,
    Model,
    chat,
    request_grammar,
    request_prompt,
)

FOLDER = Path(__file__).parents[1] / "templates"
END = "<|im_end|>"


# ── reasoning ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tokens_a_step", [1, 50])
@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_separate_from_content(
    live: Any, model: Model, stream: bool, tokens_a_step: int
) -> None:
    engine = model("qwen3", "<think>\nIt is ü.\n</think>\n\nYes.")
    engine.does.tokens_a_step = tokens_a_step
    gateway = await live(engine)
    result = await chat(gateway, stream)
    assert (result["reasoning_content"], result["content"], result["reason"]) == ("It is ü.", "Yes.", "stop")
    reasoning = engine.tokenizer.encode("<think>\nIt is ü.\n</think>", add_special_tokens=False)
    assert result["usage"].completion_tokens_details.reasoning_tokens == len(reasoning)


@pytest.mark.parametrize("stream", [False, True])
async def test_truncated_reasoning_counts_each_token_once(live: Any, model: Model, stream: bool) -> None:
    engine = model("qwen3", "<think>\nIt is ü.\n</think>\n\nYes.")
    gateway = await live(engine)
    result = await chat(gateway, stream, max_tokens=4)
    usage = result["usage"]
    assert (result["content"], result["reason"], usage.completion_tokens) == ("", "length", 4)
    assert usage.completion_tokens_details.reasoning_tokens == 4


async def test_thinking_can_be_disabled(live: Any, model: Model) -> None:
    engine = model("qwen3", "Yes.</think>")
    gateway = await live(engine)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    result = await chat(gateway, False, extra_body=off)
    assert request_prompt(engine).endswith("<think>\n\n</think>\n\n")
    assert result["content"] == "Yes.</think>"
    assert "reasoning_content" not in result
    json_form = {"type": "json_object"}
    await chat(gateway, False, response_format=json_form, extra_body=off)
    assert engine.requests[-1].sampling.grammar[0] == "json_object"
    await chat(gateway, False, response_format=json_form)
    reasoning, rest = (request_grammar(engine) or {})["elements"]
    thought, breaks = reasoning["content"]["elements"]
    assert (reasoning["type"], thought["begin"], breaks["type"], rest["type"]) == (
        "optional",
        "<think>",
        "regex",
        "json_schema",
    )


async def test_prompt_may_open_the_reasoning(live: Any, model: Model) -> None:
    template = "{{ messages[0].content }}<think>\n"
    engine = model(None, "hm</think>yes", chat_template=template)
    gateway = await live(engine)
    result = await chat(gateway, True)
    assert (result["reasoning_content"], result["content"]) == ("hm", "yes")
    await chat(gateway, False, tools=TOOLS, tool_choice="required")
    thought = (request_grammar(engine) or {})["elements"][0]["elements"][0]
    assert (thought["begin"], thought["end"]) == ("", "</think>")
    plain = await live(model(None, "hm</think>yes", chat_template=template), reasoning_parser="none")
    assert (await chat(plain, False))["content"] == "hm</think>yes"


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_may_precede_a_call(live: Any, model: Model, stream: bool) -> None:
    text = (
        f'<think>\nhm\n</think>\n\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
    )
    gateway = await live(model("qwen3", text))
    result = await chat(gateway, stream, tools=TOOLS)
    assert (result["reasoning_content"], result["tool_calls"]) == ("hm", [("weather", ARGUMENTS)])
    assert result.get("content", "") == ""


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def schema(**parts: Any) -> dict[str, Any]:
    return {"tools": [tool(parameters={"type": "object", **parts})]}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


PARAMETERS = "tools[0].function.parameters"
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
    ({"tools": [tool(name="")]}, "tools[0].function.name"),
    ({"tools": [tool(name="x" * 65)]}, "tools[0].function.name"),
    ({"tools": [tool(), tool()]}, "tools[1].function.name"),
    ({"tools": [tool(name=f"f{i}") for i in range(129)]}, "tools"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [tool(parameters=[])]}, PARAMETERS),
    (schema(type="array"), f"{PARAMETERS}.type"),
    (schema(type="text"), f"{PARAMETERS}.type"),
    (schema(properties=[]), f"{PARAMETERS}.properties"),
    (schema(properties={"a": 1}), f"{PARAMETERS}.properties.a"),
    (schema(properties={"a": {"type": ["string", 1]}}), f"{PARAMETERS}.properties.a.type"),
    (schema(properties={"a": {"items": [{"enum": []}]}}), f"{PARAMETERS}.properties.a.items[0].enum"),
    (schema(required="a"), f"{PARAMETERS}.required"),
    (schema(anyOf=[]), f"{PARAMETERS}.anyOf"),
    (schema(additionalProperties=1), f"{PARAMETERS}.additionalProperties"),
    (schema(properties={"a": {"minLength": -1}}), f"{PARAMETERS}.properties.a.minLength"),
    (schema(properties={"a": {"pattern": 1}}), f"{PARAMETERS}.properties.a.pattern"),
    (schema(properties={"a": {"default": nested(200)}}), PARAMETERS),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "must"}, "tool_choice"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice.function.name",
    ),
    (
        {
            "tools": TOOLS,
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        },
        "tool_choice.allowed_tools.tools",
    ),
    ({"functions": [{"name": "f"}]}, "functions"),
    (
        {
            "messages": [
                *USER,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ["a"]}}]},
            ]
        },
        "messages[1].tool_calls[0].function.arguments",
    ),
]


async def test_invalid_tools_are_named(live: Any, model: Model) -> None:
    gateway = await live(model("qwen25", "yes"))
    async with httpx.AsyncClient(timeout=60) as http:
        for body, param in BAD:
            body = {"model": "demo", "messages": USER, **body}
            response = await http.post(f"{gateway.url}/v1/chat/completions", json=body)
            assert response.status_code == 400, (body, response.text)
            error = response.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param), error


@pytest.mark.parametrize("text", ['{"format": {"value": "\\ud800"}}', "{", '{"structures": []}', "[" * 5000])
async def test_invalid_structural_tags_with_reasoning_are_named(live: Any, model: Model, text: str) -> None:
    gateway = await live(model("qwen3", "yes"))
    with pytest.raises(openai.BadRequestError, match="structural") as refused:
        await chat(gateway, False, extra_body={"structured_outputs": {"structural_tag": text}})
    assert refused.value.param == "structured_outputs.structural_tag"
