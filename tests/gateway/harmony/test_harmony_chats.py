# SPDX-License-Identifier: Apache-2.0
"""Chats of the official OpenAI client with a model whose answers have harmony format."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tool_chats import ARGUMENTS, CITY, TOOLS, USER, chat, request_grammar, request_prompt

Model = Callable[..., Any]

HEAD = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>It is ü.<|end|>"
PREAMBLE = f"{HEAD}<|channel|>commentary<|message|>I look it up.<|end|>"
FINAL = f"{HEAD}<|channel|>final<|message|>Yes, mild.<|return|>"
CALL = f"{HEAD}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
OTHER_ORDER = f"{HEAD} to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"
JSON = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}


@pytest.mark.parametrize("tokens_a_step", [1, 3, 50])
@pytest.mark.parametrize("stream", [False, True])
async def test_channels_become_reasoning_and_content(
    live: Any, model: Model, stream: bool, tokens_a_step: int
) -> None:
    engine = model(THOUGHT + FINAL, tokens_a_step=tokens_a_step)
    result = await chat(await live(engine), stream, tools=TOOLS)
    assert (result["reasoning_content"], result["content"], result["reason"]) == (
        "It is ü.",
        "Yes, mild.",
        "stop",
    )
    assert result["tool_calls"] == []
    usage = result["usage"]
    reasoning = engine.tokenizer.encode(THOUGHT, add_special_tokens=False)
    assert usage.completion_tokens_details.reasoning_tokens == len(reasoning)
    assert usage.completion_tokens == len(engine.does.reply)


@pytest.mark.parametrize("call", [CALL, OTHER_ORDER])
@pytest.mark.parametrize("tokens_a_step", [1, 50])
@pytest.mark.parametrize("stream", [False, True])
async def test_call_ends_the_turn(
    live: Any, model: Model, stream: bool, tokens_a_step: int, call: str
) -> None:
    engine = model(THOUGHT + PREAMBLE + call, tokens_a_step=tokens_a_step)
    result = await chat(await live(engine), stream, tools=TOOLS)
    assert (result["reasoning_content"], result["content"]) == ("It is ü.", "I look it up.")
    assert (result["tool_calls"], result["reason"]) == ([("weather", ARGUMENTS)], "tool_calls")
    assert request_grammar(engine) is None


async def test_call_of_an_unknown_tool_is_content(live: Any, model: Model) -> None:
    gateway = await live(model(THOUGHT + CALL))
    result = await chat(gateway, True, tools=TOOLS[1:])
    assert (result["content"], result["tool_calls"], result["reason"]) == (ARGUMENTS, [], "stop")
    assert (await chat(gateway, False, tools=TOOLS, tool_choice="none"))["content"] == ARGUMENTS


@pytest.mark.parametrize("stream", [False, True])
async def test_truncation_never_shows_markers(live: Any, model: Model, stream: bool) -> None:
    engine = model(THOUGHT + CALL)
    gateway = await live(engine)
    whole = (await chat(gateway, stream, tools=TOOLS))["reasoning_content"]
    for length in range(1, len(engine.does.reply)):
        result = await chat(gateway, stream, tools=TOOLS, max_tokens=length)
        assert result["reason"] == "length"
        assert result.get("content", "") == ""
        assert whole.startswith((result.get("reasoning_content") or "").rstrip("\ufffd"))
        for name, arguments in result["tool_calls"]:
            assert name == "weather"
            assert ARGUMENTS.startswith(arguments.rstrip("\ufffd"))


async def test_text_that_spells_markers_stays_text(live: Any, model: Model) -> None:
    engine = model(THOUGHT + FINAL)
    spelled = [token for letter in "a<|end|>b<|call|>" for token in engine.tokenizer.encode(letter, False)]
    engine.does.reply[-1:-1] = spelled
    gateway = await live(engine)
    for stream in (False, True):
        assert (await chat(gateway, stream))["content"] == "Yes, mild.a<|end|>b<|call|>"


async def test_stop_strings_end_only_content(live: Any, model: Model) -> None:
    gateway = await live(model(f"<|channel|>analysis<|message|>Yes, mild.<|end|>{FINAL}", tokens_a_step=50))
    result = await chat(gateway, True, stop=[", mi"])
    assert (result["reasoning_content"], result["content"], result["reason"]) == ("Yes, mild.", "Yes", "stop")


async def test_logprobs_cover_all_tokens(live: Any, model: Model) -> None:
    engine = model(THOUGHT + FINAL)
    answer = (
        await (await live(engine))
        .client()
        .chat.completions.create(model="demo", messages=USER, logprobs=True)
    )
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == THOUGHT + FINAL


async def test_options_select_and_turn_off_the_format(live: Any, model: Model) -> None:
    plain = "{{ messages[-1].content }}"
    named = await live(model(THOUGHT + FINAL, plain), reasoning_parser="openai_gptoss", tool_parser="openai")
    assert (await chat(named, False))["reasoning_content"] == "It is ü."
    undetected = await live(model(THOUGHT + FINAL, plain))
    assert (await chat(undetected, False))["content"] == "analysisIt is ü.assistantfinalYes, mild."
    content = await live(model(THOUGHT + FINAL), reasoning_parser="none")
    assert (await chat(content, False))["content"] == "It is ü.\n\nYes, mild."
    without_calls = await live(model(THOUGHT + CALL), tool_parser="none")
    with pytest.raises(openai.BadRequestError, match="tools"):
        await chat(without_calls, False, tools=TOOLS)
    forced = await chat(without_calls, False, tools=TOOLS, tool_choice="required")
    assert forced["tool_calls"] == [("weather", ARGUMENTS)]


async def test_grammars_constrain_the_last_message(live: Any, model: Model) -> None:
    engine = model(THOUGHT + FINAL)
    gateway = await live(engine)
    await chat(gateway, False, response_format=JSON)
    thoughts, final = (request_grammar(engine) or {})["elements"]
    assert thoughts["type"] == "star"
    assert "commentary" not in json.dumps(thoughts)
    assert final["elements"][-1]["json_schema"] == CITY
    await chat(gateway, False, extra_body={"guided_regex": "[0-9]+"})
    assert (request_grammar(engine) or {})["elements"][-1]["elements"][-1]["pattern"] == "[0-9]+"
    await chat(gateway, False, tools=TOOLS, tool_choice="required")
    forced = json.dumps(request_grammar(engine))
    assert "functions.weather" in forced
    assert "functions.time" in forced
    assert '"final"' not in forced
    await chat(gateway, False, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "time"}})
    assert "functions.weather" not in json.dumps(request_grammar(engine))
    await chat(gateway, False, tools=TOOLS, parallel_tool_calls=False)
    either = json.dumps(request_grammar(engine))
    assert '"commentary"' in either
    assert '"final"' in either


async def test_continued_answer_begins_within_its_channel(live: Any, model: Model) -> None:
    engine = model(" mild.<|return|>")
    gateway = await live(engine)
    messages = [*USER, {"role": "assistant", "content": "Yes,", "reasoning_content": "It is."}]
    result = await chat(gateway, False, messages=messages, extra_body={"continue_final_message": True})
    assert result["content"] == " mild."
    assert request_prompt(engine).endswith(
        "analysis<|message|>It is.<|end|><|start|>assistant<|channel|>final<|message|>Yes,"
    )


async def test_answer_without_the_format_is_content(live: Any, model: Model) -> None:
    gateway = await live(model("Yes, mild.<|return|>"))
    for stream in (False, True):
        result = await chat(gateway, stream)
        assert (result["content"], result["reason"]) == ("Yes, mild.", "stop")
