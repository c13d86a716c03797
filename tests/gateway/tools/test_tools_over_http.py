"""Tools and reasoning over HTTP with the official OpenAI client: requests, prompts, grammars, responses."""

from __future__ import annotations

import json
from collections.abc import Callable
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
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.gateway.tools import families as tool_families
from mizzen.gateway.tools.families import mistral_call_id

FOLDER = Path(__file__).parents[1] / "templates"
END = "<|im_end|>"
SPECIAL = ["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|start_header_id|>", "<|eot_id|>"]
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


@pytest.fixture
def model(scripted: Any, tokenizer_files: dict[str, bytes]) -> Model:
    """Return a function that starts an engine of a model with one of the templates and a fixed answer."""

    def start(template: str | None, answer: str, **template_config: Any) -> Any:
        inner = tokenizers.Tokenizer.from_buffer(tokenizer_files["tokenizer.json"])
        inner.add_special_tokens(SPECIAL)
        inner.add_tokens(["<tool_call>", "</tool_call>"])
        if template in ("qwen3", None):
            inner.add_tokens(["<think>", "</think>"])
        config: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
        if template is not None:
            config["chat_template"] = (FOLDER / f"{template}.jinja").read_text()
        files = {
            "tokenizer.json": inner.to_str().encode(),
            "tokenizer_config.json": json.dumps({**config, **template_config}).encode(),
        }
        engine = scripted(files, vocab_size=inner.get_vocab_size())
        tokenizer = Tokenizer(inner)
        engine.tokenizer = tokenizer
        end = tokenizer.token_id(END)
        engine.does.reply = [*tokenizer.encode(answer, add_special_tokens=False), end]
        engine.does.end = end
        return engine

    return start


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
    """Return the message, finish reason and usage of a chat, streamed or not."""
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
    """Merge a chunk's calls as OpenAI documents it: id and name first, then arguments by index."""
    for delta in deltas:
        if delta.id is not None:
            assert delta.index == len(calls)
            assert delta.type == "function"
            assert delta.function.arguments == ""
            calls.append({"id": delta.id, "name": delta.function.name, "arguments": ""})
        else:
            assert delta.function.name is None
            calls[delta.index]["arguments"] += delta.function.arguments


ANSWERS = {
    "qwen25": f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama31": f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "mistral_tools": f'Let me see.[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]',
}


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
    """The syntax of Qwen3-Coder and later models."""
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
    assert all(one.startswith("call_") for one in ids)


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
    theirs = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    expected = theirs.apply_chat_template(
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
    """Clients send back what they received, and the model sees it as it was written."""
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
    for same in (ARGUMENTS, json.loads(ARGUMENTS)):
        await chat(gateway, False, messages=conversation_with_call(same), tools=TOOLS, extra_body=DATE)
        shown.add(request_prompt(engine))
    assert len(shown) == 2


async def test_template_that_needs_objects_rejects_other_arguments(live: Any, model: Model) -> None:
    items = "{% for call in message.tool_calls %}{% for key, value in call.function.arguments | items %}"
    template = (
        f"{{% for message in messages %}}{items}{{{{ key }}}}{{% endfor %}}{{% endfor %}}{{% endfor %}}x"
    )
    gateway = await live(model(None, "yes", chat_template=template))
    place = "messages[1].tool_calls[0].function.arguments"
    with pytest.raises(openai.BadRequestError, match="JSON object") as refused:
        await chat(gateway, False, messages=conversation_with_call("{"))
    assert refused.value.param == place
    await chat(gateway, False, messages=conversation_with_call(ARGUMENTS))
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"},
    ]
    with pytest.raises(openai.BadRequestError, match="input: a call's arguments must be") as refused:
        await gateway.client().responses.create(model="demo", input=items)
    assert refused.value.param == "input"
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
    assert [part["type"] for part in either["elements"]] == ["tags_with_separator", "json_schema"]


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
    """Without a known format, the model cannot choose to call a tool."""
    engine = model("qwen2", f'[{{"name": "weather", "arguments": {ARGUMENTS}}}]')
    gateway = await live(engine)
    result = await chat(gateway, stream, tools=TOOLS, tool_choice="required")
    assert (result["tool_calls"], result["reason"]) == ([("weather", ARGUMENTS)], "tool_calls")
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(gateway, stream, tools=TOOLS)
    assert refused.value.param == "tools"
    assert "--tool-parser" in str(refused.value)


async def test_option_selects_the_parser(live: Any, model: Model) -> None:
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
    reasoning, _, rest = (request_grammar(engine) or {})["elements"]
    assert (reasoning["type"], reasoning["content"]["begin"], rest["type"]) == (
        "optional",
        "<think>",
        "json_schema",
    )


async def test_prompt_may_open_the_reasoning(live: Any, model: Model) -> None:
    template = "{{ messages[0].content }}<think>\n"
    engine = model(None, "hm</think>yes", chat_template=template)
    gateway = await live(engine)
    result = await chat(gateway, True)
    assert (result["reasoning_content"], result["content"]) == ("hm", "yes")
    await chat(gateway, False, tools=TOOLS, tool_choice="required")
    reasoning = (request_grammar(engine) or {})["elements"][0]
    assert (reasoning["begin"], reasoning["end"]) == ("", "</think>")
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
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [tool(extra=1)]}, "tools[0].function.extra"),
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
