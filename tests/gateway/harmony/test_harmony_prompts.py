# SPDX-License-Identifier: Apache-2.0
"""Conversations as a chat template like gpt-oss's renders them: reasoning, calls, results, instructions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tool_chats import ARGUMENTS, TOOLS, chat, request_prompt

Model = Callable[..., Any]
TEMPLATE = (Path(__file__).parents[1] / "templates/harmony.jinja").read_text()

FINAL = "<|channel|>final<|message|>Yes.<|return|>"
HEAD = "<|start|>assistant"
CALL = f"{HEAD} to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"
TIME = f"{HEAD} to=functions.time<|channel|>commentary json<|message|>{{}}<|call|>"


def analysis(text: str) -> str:
    return f"{HEAD}<|channel|>analysis<|message|>{text}<|end|>"


def final(text: str) -> str:
    return f"{HEAD}<|channel|>final<|message|>{text}<|end|>"


def result(text: str, name: str = "weather") -> str:
    return f'<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"{text}"<|end|>'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def shown(text: str) -> str:
    return f"<|start|>user<|message|>{text}<|end|>"


def call(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = call("weather", ARGUMENTS, "a")
CLOCK = call("time", "{}", "b")


def answer(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def assistant(content: str | None = None, *calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more, **({"tool_calls": [*calls]} if calls else {})}


CONVERSATIONS = {
    "reasoning of a finished turn": (
        [user("a"), assistant("b", reasoning="hm"), user("c")],
        [shown("a"), final("b"), shown("c")],
    ),
    "reasoning before a call": (
        [user("a"), assistant(None, WEATHER, reasoning_content="hm"), answer("a", "12")],
        [shown("a"), analysis("hm"), CALL, result("12")],
    ),
    "field thinking": (
        [user("a"), assistant(None, WEATHER, thinking="hm"), answer("a", "12")],
        [shown("a"), analysis("hm"), CALL, result("12")],
    ),
    "calls in sequence": (
        [
            *(user("a"), assistant(None, WEATHER, reasoning="hm"), answer("a", "12")),
            *(assistant(None, CLOCK, reasoning="so"), answer("b", "9")),
        ],
        [shown("a"), analysis("hm"), CALL, result("12"), analysis("so"), TIME, result("9", "time")],
    ),
    "calls of a finished turn": (
        [
            *(user("a"), assistant(None, WEATHER, reasoning="hm"), answer("a", "12")),
            *(assistant("b", reasoning="so"), user("c"), assistant(None, CLOCK, reasoning="ah")),
            answer("b", "9"),
        ],
        [
            *(shown("a"), CALL, result("12"), final("b")),
            *(shown("c"), analysis("ah"), TIME, result("9", "time")),
        ],
    ),
    "parallel calls": (
        [user("a"), assistant(None, WEATHER, CLOCK, reasoning="hm"), answer("b", "9"), answer("a", "12")],
        [shown("a"), analysis("hm"), CALL, result("12"), TIME, result("9", "time")],
    ),
    "preamble": (
        [user("a"), assistant("See.", WEATHER, reasoning="hm"), answer("a", "12")],
        [
            *(shown("a"), analysis("hm"), f"{HEAD}<|channel|>commentary<|message|>See.<|end|>"),
            *(CALL, result("12")),
        ],
    ),
    "preamble in a message of its own": (
        [user("a"), assistant("See.", reasoning="hm"), assistant(None, WEATHER, reasoning="so")],
        [
            *(shown("a"), analysis("hm\n\nso"), f"{HEAD}<|channel|>commentary<|message|>See.<|end|>"),
            CALL,
        ],
    ),
    "turn without an answer": (
        [user("a"), {"role": "assistant", "reasoning": "hm"}, user("b")],
        [shown("a"), shown("b")],
    ),
}


@pytest.fixture
def prompt_of(live: Any, model: Model) -> Callable[..., Any]:
    """Return a function that returns the prompt that an engine gets for a chat."""

    async def read(messages: list[Any], **options: Any) -> str:
        engine = model(FINAL)
        await chat(await live(engine), False, messages=messages, **options)
        return request_prompt(engine)

    return read


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_conversation_is_rendered(prompt_of: Any, name: str) -> None:
    messages, turns = CONVERSATIONS[name]
    prompt = await prompt_of(messages, tools=TOOLS)
    assert prompt[prompt.index("<|start|>user") :] == "".join([*turns, HEAD])


async def test_instructions_and_tools_are_the_developers(prompt_of: Any) -> None:
    """The template shows only the first system message, so all become this message."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        user("a"),
        {"role": "developer", "content": "Be quick."},
    ]
    prompt = await prompt_of(messages, tools=TOOLS)
    assert "<|start|>developer<|message|># Instructions\n\nBe brief.\n\nBe kind.\n\nBe quick.\n\n" in prompt
    assert "// Tells the weather.\ntype weather = (_: {\ncity: string,\n}) => any;\n" in prompt
    assert prompt.endswith("<|start|>user<|message|>a<|end|><|start|>assistant")


@pytest.mark.parametrize(
    ("effort", "shown_effort"),
    [
        ("low", "low"),
        ("high", "high"),
        ("none", "low"),
        ("minimal", "low"),
        ("xhigh", "high"),
        (None, "medium"),
    ],
)
async def test_effort_is_one_that_the_model_knows(
    prompt_of: Any, effort: str | None, shown_effort: str
) -> None:
    options = {} if effort is None else {"reasoning_effort": effort}
    assert f"\nReasoning: {shown_effort}\n" in await prompt_of([user("a")], **options)


SHOPPING: dict[str, Any] = {
    "properties": {
        "items": {"type": "array", "description": "entries on the shopping list", "items": {"type": "string"}}
    },
    "type": "object",
}
SHOPPING_TEXT = (
    '{"properties":{"items":{"type":"array","description":"entries on the shopping list",'
    '"items":{"type":"string"}}},"type":"object"}'
)
"""Schema of the example in https://github.com/openai/harmony/blob/main/docs/format.md, as shown there."""


def response_format(**more: Any) -> dict[str, Any]:
    schema = {"name": "shopping_list", "schema": SHOPPING, **more}
    return {"type": "json_schema", "json_schema": schema}


async def test_the_schema_of_the_answer_ends_the_developers_message(prompt_of: Any) -> None:
    helper = {"role": "system", "content": "You are a helpful shopping assistant"}
    need = user("I need to buy coffee, soda and eggs")
    prompt = await prompt_of([helper, need], response_format=response_format())
    assert prompt.endswith(
        "<|end|><|start|>developer<|message|># Instructions\n\nYou are a helpful shopping assistant\n\n"
        f"# Response Formats\n\n## shopping_list\n\n{SHOPPING_TEXT}<|end|>"
        "<|start|>user<|message|>I need to buy coffee, soda and eggs<|end|><|start|>assistant"
    )
    assert prompt.count("<|start|>") == 4


async def test_the_schema_follows_tools_and_has_its_description(prompt_of: Any) -> None:
    form = response_format(description="What to buy.\nNo prices.")
    prompt = await prompt_of([user("a")], tools=TOOLS, response_format=form)
    developer = prompt[prompt.index("<|start|>developer") : prompt.index("<|start|>user")]
    assert "\ntype weather = (_: {\n" in developer
    section = f"## shopping_list\n\n// What to buy.\n// No prices.\n{SHOPPING_TEXT}<|end|>"
    assert developer.endswith(f"\n\n# Response Formats\n\n{section}")


async def test_the_schema_is_shown_without_instructions_and_tools(prompt_of: Any) -> None:
    prompt = await prompt_of([user("a")], response_format=response_format())
    section = f"# Response Formats\n\n## shopping_list\n\n{SHOPPING_TEXT}"
    expected = f"<|end|><|start|>developer<|message|>{section}<|end|><|start|>user<|message|>a<|end|>"
    assert prompt.endswith(f"{expected}<|start|>assistant")
    plain = await prompt_of([user("a")], response_format={"type": "json_object"})
    assert "Response Formats" not in plain and "developer" not in plain


async def test_a_template_that_shows_schemas_itself_is_left_alone(live: Any, model: Model) -> None:
    engine = model(FINAL, template=TEMPLATE + "{#- # Response Formats #}")
    await chat(await live(engine), False, messages=[user("a")], response_format=response_format())
    assert "shopping_list" not in request_prompt(engine)


async def test_template_arguments_take_precedence(prompt_of: Any) -> None:
    extra = {"chat_template_kwargs": {"reasoning_effort": "max"}}
    prompt = await prompt_of([user("a")], reasoning_effort="none", extra_body=extra)
    assert "\nReasoning: max\n" in prompt


async def test_tokenize_renders_the_same_prompt(live: Any, model: Model) -> None:
    engine = model(FINAL)
    gateway = await live(engine)
    messages, _ = CONVERSATIONS["preamble"]
    await chat(gateway, False, messages=messages, tools=TOOLS)
    async with httpx.AsyncClient(timeout=60) as http:
        body = {"model": "demo", "messages": messages, "tools": TOOLS}
        answered = await http.post(f"{gateway.url}/tokenize", json=body)
    tokens = answered.json()["tokens"]
    assert engine.tokenizer.decode(tokens, skip_special_tokens=False) == request_prompt(engine)
