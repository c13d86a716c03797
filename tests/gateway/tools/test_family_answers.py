# SPDX-License-Identifier: Apache-2.0
"""Answers in the formats of several families, with reasoning, content and calls, over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from tool_chats import ARGUMENTS, CITY, TOOLS, Model, chat, request_grammar

SHOW = "{{ tools | tojson if tools else '' }}{{ messages[-1].content }}"
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
ACTION = f'[\n    {{"tool_call_id": "0", "tool_name": "weather", "parameters": {ARGUMENTS}}}\n]'
ANSWERS = {
    "cohere": (
        "<|START_ACTION|><|END_THINKING|>",
        f"<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>{ACTION}<|END_ACTION|>",
        ("Hm.", "", True),
    ),
    "cohere without a call": (
        "<|START_ACTION|><|END_THINKING|>",
        "<|START_RESPONSE|>Fine.<|END_RESPONSE|>",
        (None, "Fine.", False),
    ),
    "granite": (
        "<|tool_call|><think></think><response></response>",
        f"<think>Hm.</think><response>See.</response><|tool_call|>[{CALL}]",
        ("Hm.", "See.", True),
    ),
    "granite 3.2": (
        "<|tool_call|> 'Here is my thought process:' 'Here is my response:'",
        "Here is my thought process: Hm.\n\nHere is my response:\nFine.",
        ("Hm.", "Fine.", False),
    ),
    "hunyuan": (
        "<tool_calls><think></think><answer></answer>",
        f"<think>\nHm.\n</think>\n<answer>\nSee.<tool_calls>[{CALL}]</tool_calls>\n</answer>",
        ("Hm.", "See.", True),
    ),
    "hunyuan-dense": (
        "<tool_calls><tool_call></tool_call></tool_calls><think></think><answer></answer>",
        f"<think>\nHm.\n</think>\n<answer>\nSee.\n</answer><tool_calls><tool_call>weather\n```json\n{ARGUMENTS}\n"
        "```</tool_call></tool_calls>",
        ("Hm.", "See.", True),
    ),
    "smollm3-python": (  # code that the client runs; the parameter python_tools of its template asks for it
        "<tool_call></think>",
        '<think>Hm.</think>See.\n<code>print(weather(city="Köln"))</code>',
        ("Hm.", 'See.\n<code>print(weather(city="Köln"))</code>', False),
    ),
    "seed-oss": (
        "<seed:tool_call></seed:think>",
        "<seed:think>Hm.</seed:think>See.\n<seed:tool_call>\n<function=weather>\n"
        "<parameter=city>Köln</parameter>\n</function>\n</seed:tool_call>",
        ("Hm.", "See.", True),
    ),
    "olmo3": (
        "<function_calls></think>",
        '<think>Hm.</think>See.<function_calls>weather(city="Köln")</function_calls>',
        ("Hm.", "See.", True),
    ),
    "glm4": ("[gMASK]<|observation|>", f"weather\n{ARGUMENTS}", (None, "", True)),
    "glm45": (
        "<arg_key></think>",
        "<think>Hm.</think>See.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
        "</tool_call>",
        ("Hm.", "See.", True),
    ),
}
"""Markers by which the family is detected, an answer, and its reasoning, content and whether it calls."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
async def test_answer_is_split_into_its_parts(live: Any, model: Model, name: str, stream: bool) -> None:
    markers, answer, (reasoning, content, calls) = ANSWERS[name]
    engine = model("bare", answer, chat_template=SHOW + f"{{# {markers} #}}")
    gateway = await live(engine)
    result = await chat(gateway, stream, tools=TOOLS)
    assert (result.get("reasoning_content") or None) == reasoning
    assert result.get("content", "") == content
    assert result["tool_calls"] == ([("weather", ARGUMENTS)] if calls else [])
    assert result["reason"] == ("tool_calls" if calls else "stop")


async def test_cohere_grammar_uses_special_tokens_and_answer_tags(live: Any, model: Model) -> None:
    markers, answer, _ = ANSWERS["cohere"]
    engine = model("bare", answer, chat_template=SHOW + f"{{# {markers} #}}")
    gateway = await live(engine)
    await chat(gateway, False, tools=TOOLS, tool_choice="required")
    forced = str(request_grammar(engine))
    assert str(engine.tokenizer.token_id("<|START_ACTION|>")) in forced
    assert str(CITY) in forced
    assert str(engine.tokenizer.token_id("<|START_RESPONSE|>")) not in forced
    await chat(gateway, False, response_format={"type": "json_object"})
    assert str(engine.tokenizer.token_id("<|START_RESPONSE|>")) in str(request_grammar(engine))
