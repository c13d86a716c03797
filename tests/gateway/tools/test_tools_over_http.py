# SPDX-License-Identifier: Apache-2.0
"""Tools and reasoning over HTTP with the official OpenAI client: requests, prompts, grammars, responses."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tokenizers

from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.reasoning import families as reasoning_families
from mizzen.gateway.tools import families as tool_families
from mizzen.gateway.tools.families import mistral_call_id
from tool_chats import (
    ANSWERS,
    ARGUMENTS,
    CITY,
    TIME,
    TOOLS,
    USER,
    WEATHER,
    Model,
    chat,
    request_grammar,
    request_prompt,
)

FOLDER = Path(__file__).parents[1] / "templates"
END = "<|im_end|>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", ANSWERS)
async def test_model_calls_a_tool(live: Any, model: Model, template: str, stream: bool) -> None:
    engine = model(template, ANSWERS[template])
    gateway = await live(engine)
    result = await chat(gateway, stream, tools=TOOLS)
    assert result["tool_calls"] == [("weather", ARGUMENTS)]
    assert result["reason"] == "tool_calls"
    assert result.get("content", "") == ("" if template == "llama31" else "Let me see.")
    assert "weather" in request_prompt(engine)
    assert request_grammar(engine) is None


@pytest.mark.parametrize("stream", [False, True])
async def test_qwen_xml_calls_are_detected_by_the_template(live: Any, model: Model, stream: bool) -> None:
    """The template contains the XML tags by which Qwen3-Coder and later models call tools."""
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>"
    template = "{{ tools | tojson if tools else '' }}{{ messages[-1].content }}<function=x><parameter=y>"
    engine = model(None, f"Let me see.\n{text}", chat_template=template)
    gateway = await live(engine, reasoning_parser="none")
    result = await chat(gateway, stream, tools=TOOLS)
    assert (result["content"], result["tool_calls"]) == ("Let me see.", [("weather", ARGUMENTS)])
    assert result["reason"] == "tool_calls"
    await chat(gateway, stream, tools=TOOLS, tool_choice="required")
    tags = (request_grammar(engine) or {})["tags"]
    assert tags[0]["begin"] == "<tool_call>\n<function=weather>\n"
    assert (tags[0]["content"]["style"], tags[0]["content"]["json_schema"]) == ("qwen_xml", CITY)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_choice_has_its_own_calls(live: Any, model: Model, stream: bool) -> None:
    call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>\n'
    gateway = await live(model("qwen25", call * 2))
    result = await chat(gateway, stream, tools=TOOLS)
    assert result["tool_calls"] == [("time", "{}"), ("time", "{}")]
    answer = await gateway.client().chat.completions.create(model="demo", messages=USER, tools=TOOLS, n=2)
    ids = {call.id for choice in answer.choices for call in choice.message.tool_calls or []}
    assert len(ids) == 4
    assert all(call_id.startswith("call_") for call_id in ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_text_that_is_not_a_call_stays_content(live: Any, model: Model, stream: bool) -> None:
    gateway = await live(model("qwen25", '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>'))
    result = await chat(gateway, stream, tools=TOOLS)
    assert (result["tool_calls"], result["reason"]) == ([], "stop")
    assert result["content"].strip() == '{"name": "rm", "arguments": {}}'
    none = await chat(gateway, stream, tools=TOOLS, tool_choice="none")
    assert (none["tool_calls"], none["reason"]) == ([], "stop")
    assert none["content"].startswith("<tool_call>")


async def test_truncated_call_has_finish_reason_length(live: Any, model: Model) -> None:
    engine = model("qwen25", ANSWERS["qwen25"])
    gateway = await live(engine)
    cut = len(engine.does.reply) - 12
    result = await chat(gateway, True, tools=TOOLS, max_tokens=cut)
    assert result["reason"] == "length"
    name, arguments = result["tool_calls"][0]
    assert name == "weather"
    assert ARGUMENTS.startswith(arguments)
    assert arguments != ARGUMENTS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", ANSWERS)
async def test_stop_strings_end_content_but_not_calls(
    live: Any, model: Model, template: str, stream: bool
) -> None:
    engine = model(template, ANSWERS[template])
    gateway = await live(engine)
    result = await chat(gateway, stream, tools=TOOLS, stop=["Köln", '"name"', "}"])
    assert (result["tool_calls"], result["reason"]) == ([("weather", ARGUMENTS)], "tool_calls")
    if template != "llama31":
        result = await chat(gateway, stream, tools=TOOLS, stop=["zzz", " see"])
        assert (result["content"], result["tool_calls"], result["reason"]) == ("Let me", [], "stop")
        assert result["usage"].completion_tokens < len(engine.does.reply) // 2


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_do_not_end_reasoning(live: Any, model: Model, stream: bool) -> None:
    gateway = await live(model("qwen3", "<think>\nA mast.\n\nOr so.\n</think>\n\nA mast.\n\nNo more."))
    result = await chat(gateway, stream, stop=["\n\n"])
    assert (result["reasoning_content"], result["content"]) == ("A mast.\n\nOr so.", "A mast.")
    assert result["reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", ANSWERS)
async def test_call_left_open_by_the_model_has_finish_reason_stop(
    live: Any, model: Model, template: str, stream: bool
) -> None:
    broken = ANSWERS[template].partition('"}')[0]
    gateway = await live(model(template, broken))
    result = await chat(gateway, stream, tools=TOOLS)
    assert (result["tool_calls"], result["reason"]) == ([("weather", ARGUMENTS.partition('"}')[0])], "stop")


@pytest.mark.parametrize("template", [*ANSWERS, "qwen2"])
async def test_truncated_forced_call_shows_no_syntax_as_content(
    live: Any, model: Model, template: str
) -> None:
    text = ANSWERS.get(template, f'[{{"name": "weather", "arguments": {ARGUMENTS}}}]')
    engine = model(template, text.removeprefix("Let me see.").lstrip())
    gateway = await live(engine)
    engine.does.tokens_a_step = 50
    for most in range(1, len(engine.does.reply)):
        result = await chat(gateway, most % 2 == 1, tools=TOOLS, tool_choice="required", max_tokens=most)
        assert (result.get("content", ""), result["reason"]) == ("", "length")
        for name, arguments in result["tool_calls"]:
            assert name == "weather"
            assert ARGUMENTS.startswith(arguments.rstrip("\ufffd"))


@pytest.mark.parametrize("template", ANSWERS)
async def test_prompts_equal_those_of_transformers(live: Any, model: Model, template: str) -> None:
    from transformers import PreTrainedTokenizerFast

    engine = model(template, "yes")
    gateway = await live(engine)
    call = {"name": "weather", "arguments": ARGUMENTS}
    conversation = [
        *USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "12 °C"},
    ]
    await chat(gateway, False, messages=conversation, tools=[WEATHER], extra_body=DATE)
    call_id = mistral_call_id("call_1") if template == "mistral_tools" else "call_1"
    written = [
        *USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {**call, "arguments": json.loads(ARGUMENTS)},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call_id, "content": "12 °C"},
    ]
    source = (FOLDER / f"{template}.jinja").read_text()
    inner = tokenizers.Tokenizer.from_buffer(engine.files["tokenizer.json"])
    reference = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    expected = reference.apply_chat_template(
        written,
        tools=[WEATHER],
        chat_template=source,
        add_generation_prompt=True,
        tokenize=False,
        **DATE["chat_template_kwargs"],
    )
    assert request_prompt(engine) == expected
    body = {"model": "demo", "messages": conversation, "tools": [WEATHER], **DATE}
    async with httpx.AsyncClient(timeout=60) as client:
        response = await client.post(f"{gateway.url}/tokenize", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["tokens"] == np.frombuffer(engine.requests[-1].prompt, "<i4").tolist()


DATE = {"chat_template_kwargs": {"date_string": "1 Jan 2026"}}


def conversation_with_call(arguments: Any) -> list[Any]:
    """Return a conversation with a tool call."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    tool = {"role": "tool", "tool_call_id": "call_1", "content": "no JSON"}
    return [*USER, {"role": "assistant", "tool_calls": [call]}, tool]


@pytest.mark.parametrize("template", ANSWERS)
async def test_arguments_of_earlier_calls_may_be_invalid_json(live: Any, model: Model, template: str) -> None:
    """Clients send arguments back as they received them, and the prompt contains them unchanged."""
    engine = model(template, "yes")
    gateway = await live(engine)
    for broken in ('{"city": "Kö', "city=Köln", "[1]", '{"city": "\\ud800"}', "{" * 500):
        await chat(gateway, False, messages=conversation_with_call(broken), tools=TOOLS, extra_body=DATE)
        assert json.dumps(broken, ensure_ascii=False)[1:-1] in request_prompt(engine)
    shown = set()
    for empty in ("", "null", "{}", {}, None):
        await chat(gateway, False, messages=conversation_with_call(empty), tools=TOOLS, extra_body=DATE)
        shown.add(request_prompt(engine))
    assert len(shown) == 1
    for unchanged in (ARGUMENTS, json.loads(ARGUMENTS)):
        await chat(gateway, False, messages=conversation_with_call(unchanged), tools=TOOLS, extra_body=DATE)
        shown.add(request_prompt(engine))
    assert len(shown) == 2


async def test_template_that_needs_objects_gets_other_arguments_as_one_value(live: Any, model: Model) -> None:
    items = "{% for call in message.tool_calls %}{% for key, value in call.function.arguments | items %}"
    shown = f"{items}{{{{ call.function.name }}}} {{{{ key }}}}={{{{ value }}}}{{% endfor %}}{{% endfor %}}"
    engine = model(None, "yes", chat_template=f"{{% for message in messages %}}{shown}{{% endfor %}}x")
    gateway = await live(engine)
    await chat(gateway, False, messages=conversation_with_call("{"))
    assert request_prompt(engine) == "weather arguments={x"
    await chat(gateway, False, messages=conversation_with_call(ARGUMENTS))
    assert request_prompt(engine) == "weather city=Kölnx"
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}
    await gateway.client().responses.create(model="demo", input=[{"role": "user", "content": "Hi"}, call])
    assert request_prompt(engine) == "f arguments={x"
    without = await live(model(None, "yes"))
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        await chat(without, False, messages=conversation_with_call("{"))


# ── forced calls ──────────────────────────────────────────────────────────────────────────────────────────


async def test_required_and_named_tools_are_forced_by_grammar(live: Any, model: Model) -> None:
    engine = model("qwen25", ANSWERS["qwen25"].removeprefix("Let me see.\n"))
    gateway = await live(engine)
    result = await chat(gateway, False, tools=TOOLS, tool_choice="required")
    assert result["tool_calls"] == [("weather", ARGUMENTS)]
    assert result["reason"] == "tool_calls"
    required = request_grammar(engine)
    assert required is not None
    assert required["type"] == "tags_with_separator"
    assert [tag["begin"] for tag in required["tags"]] == [
        f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in ("weather", "time")
    ]
    assert required["tags"][0]["content"]["json_schema"] == CITY
    assert not required["stop_after_first"]
    await chat(gateway, False, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert (request_grammar(engine) or {})["stop_after_first"]
    named = {"type": "function", "function": {"name": "weather"}}
    await chat(gateway, False, tools=TOOLS, tool_choice=named)
    format = request_grammar(engine) or {}
    assert ([tag["begin"][-26:] for tag in format["tags"]], format["stop_after_first"]) == (
        ['me": "weather", "arguments": '[-26:]],
        True,
    )
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "time"}}]}
    await chat(gateway, False, tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert len((request_grammar(engine) or {})["tags"]) == 1
    assert "Tells the weather." in request_prompt(engine)


async def test_strict_tools_constrain_free_calls(live: Any, model: Model) -> None:
    engine = model("qwen25", ANSWERS["qwen25"])
    gateway = await live(engine)
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    await chat(gateway, False, tools=[strict, TIME])
    free = request_grammar(engine) or {}
    assert (free["type"], free["triggers"]) == ("triggered_tags", ["<tool_call>"])
    assert [tag["content"]["json_schema"].get("additionalProperties") for tag in free["tags"]] == [None, True]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}
    await chat(gateway, False, tools=TOOLS, response_format=schema)
    either = request_grammar(engine) or {}
    assert [element["type"] for element in either["elements"]] == ["tags_with_separator", "json_schema"]


async def test_grammars_name_special_tokens_by_id(live: Any, model: Model) -> None:
    engine = model("mistral_tools", ANSWERS["mistral_tools"].removeprefix("Let me see."))
    gateway = await live(engine)
    result = await chat(gateway, False, tools=TOOLS, tool_choice="required")
    assert result["tool_calls"] == [("weather", ARGUMENTS)]
    token, listed = (request_grammar(engine) or {})["elements"]
    assert token == {"type": "token", "token": engine.tokenizer.token_id("[TOOL_CALLS]")}
    assert listed["elements"][0]["value"] == "["


@pytest.mark.parametrize("stream", [False, True])
async def test_model_without_tool_format_can_only_be_forced(live: Any, model: Model, stream: bool) -> None:
    """If the tool format is unknown, requests that let the model choose whether to call a tool get 400."""
    engine = model("qwen2", f'[{{"name": "weather", "arguments": {ARGUMENTS}}}]')
    gateway = await live(engine)
    result = await chat(gateway, stream, tools=TOOLS, tool_choice="required")
    assert (result["tool_calls"], result["reason"]) == ([("weather", ARGUMENTS)], "tool_calls")
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(gateway, stream, tools=TOOLS)
    assert refused.value.param == "tools"
    assert "--tool-parser" in str(refused.value)


async def test_option_selects_the_tool_parser(live: Any, model: Model) -> None:
    engine = model("qwen2", ANSWERS["qwen25"])
    gateway = await live(engine, tool_parser="hermes")
    assert (await chat(gateway, False, tools=TOOLS))["tool_calls"] == [("weather", ARGUMENTS)]
    other = await live(model("qwen25", ANSWERS["qwen25"]), tool_parser="none")
    with pytest.raises(openai.BadRequestError):
        await chat(other, False, tools=TOOLS)


def test_options_list_all_families() -> None:
    choices = {field.name: field.metadata["choices"] for field in fields(GatewayConfig)}
    assert choices["tool_parser"] == tool_families.NAMES
    assert choices["reasoning_parser"] == reasoning_families.NAMES
