# SPDX-License-Identifier: Apache-2.0
"""Conversations in OpenAI's form render as in Transformers, with chat templates of more than 40 shapes.

`templates/shapes` holds a template per model family, in its shape but not its words. Its first line states
the form of the messages that Transformers is given, because its users have to know it:

- `object` or `text`: arguments of calls; `either`: both; `none`: the template does not show calls
- `null` or `absent`: `content` of a message with calls and no text, which is otherwise empty text
- `apart`: content and calls need a message each
- `single`: each call needs a separate message, followed by its result
- `alternate`: the template knows no results; they are the user's messages
- `metadata`: each call is a message with the name as `metadata`; results have the role `observation`
- `xml`, `system-list`, `system-text`: tools are the variable `xml_tools`, or `tools` of the system message
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from mizzen.gateway.openai.messages import Message, template_messages
from mizzen.gateway.text.template import ChatTemplate, TemplateError

SHAPES = {path.stem: path.read_text() for path in (Path(__file__).parents[1] / "templates/shapes").iterdir()}
TOKENS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "It's <b>weather</b> & größer",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def call(arguments: Any, name: str = "weather", call_id: str = "id0000001") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(content: Any, *calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more, **({"tool_calls": [*calls]} if calls else {})}


def result(content: Any, call_id: str = "id0000001") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


KOELN = call('{"city": "Köln", "days": 2}')
BONN = call({"city": "Bonn"}, call_id="id0000002")
NESTED = call({"q": "a\"b\\ {'x': True}", "n": None, "f": True, "deep": {"l": [1, 2.5, "😀"]}})
SYSTEM = {"role": "system", "content": "Be brief.\n"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one message": [user("  Hi <there> 'you' & \"me\" {{ x }} ")],
    "system": [SYSTEM, user("Hi")],
    "developer": [{"role": "developer", "content": "Be brief."}, user("Hi")],
    "unicode": [user("Größe 😀 \u202e漢字 \u00a0e\u0301\u2028"), assistant("ﷺ"), user("𝒳\t\r\n")],
    "turns": [user("a"), assistant("b "), user("c"), assistant("d"), user("e")],
    "parts": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
    "think tags": [user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c")],
    "reasoning": [user("a"), assistant("b", reasoning_content="because"), user("c")],
    "call": [user("Wetter?"), assistant(None, KOELN), result("12 °C")],
    "call of an object": [user("w?"), assistant("", NESTED), result("12")],
    "call with content": [user("w?"), assistant("Hm.", KOELN), result("12"), assistant("12."), user("?")],
    "parallel calls": [user("w?"), assistant(None, KOELN, BONN), result("1"), result("2", "id0000002")],
    "results out of order": [user("w?"), assistant("", KOELN, BONN), result("2", "id0000002"), result("1")],
    "several calls": [user("w?"), assistant(None, KOELN), result("1"), assistant(None, NESTED), result("2")],
    "result in parts": [user("w?"), assistant(None, KOELN), result([{"type": "text", "text": "12"}])],
    "no arguments": [SYSTEM, user("w?"), assistant(None, call("{}")), result(""), assistant("a"), user("b")],
    "reasoning and call": [user("w?"), assistant(None, KOELN, reasoning_content="hm"), result("1")],
    "unanswered call": [user("w?"), assistant(None, KOELN)],
    "prefill": [user("Say"), assistant("It is")],
    "prefill of a marker": [user("Say"), assistant("im")],
    "prefill with a space": [user("end"), assistant(" <|end ")],
}  # fmt: skip


def split_by_hand(messages: list[dict[str, Any]], form: list[str]) -> list[dict[str, Any]]:
    """Return the messages that a user of Transformers, who knows the template, would write."""
    written: list[dict[str, Any]] = []
    results = {message["tool_call_id"]: message for message in messages if message["role"] == "tool"}
    for message in messages:
        calls = message.get("tool_calls", [])
        content = message["content"]
        if not calls:
            written.append(message)
        elif "metadata" in form:
            written += [{"role": "assistant", "content": content}] if content else []
            functions = [item["function"] for item in calls]
            written += [
                {"role": "assistant", "metadata": function["name"], "content": as_text(function["arguments"])}
                for function in functions
            ]
        elif "none" in form:
            texts = [
                f'{{"name": "weather", "arguments": {as_text(item["function"]["arguments"])}}}'
                for item in calls
            ]
            text = "[" + ", ".join(texts) + "]"
            written.append({**message, "content": f"{content}\n{text}" if content else text})
            del written[-1]["tool_calls"]
        else:
            convert = as_text if "text" in form else as_object
            calls = [{**item, "function": {**item["function"]}} for item in calls]
            for item in calls:
                item["function"]["arguments"] = convert(item["function"]["arguments"])
            rest = dict(message)
            if content and "apart" in form and ("null" in form or "absent" in form):
                written.append({key: value for key, value in message.items() if key != "tool_calls"})
                rest = {"role": "assistant", "content": ""}
            groups = [[item] for item in calls] if "single" in form else [calls]
            for number, group in enumerate(groups):
                written.append({**rest, "tool_calls": group})
                if not written[-1]["content"] and "null" in form:
                    written[-1]["content"] = None
                if not written[-1]["content"] and "absent" in form:
                    del written[-1]["content"]
                rest = {"role": "assistant", "content": ""}
                if number < len(groups) - 1 and group[0]["id"] in results:
                    written.append(results.pop(group[0]["id"]))
    unmoved = [item for item in written if item["role"] != "tool"]
    if "single" in form and len([item for item in unmoved if item.get("tool_calls")]) > 1:
        written = [item for index, item in enumerate(written) if item not in written[:index]]
    if "metadata" in form:
        written = [{**item, "role": item["role"].replace("tool", "observation")} for item in written]
    if "alternate" in form:
        return [
            {"role": role, "content": "\n".join(item["content"] for item in group)}
            for role, found in groupby(written, lambda item: item["role"].replace("tool", "user"))
            for group in [list(found)]
        ]
    return written


def tools_by_hand(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, form: list[str]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the messages and further variables by which a user of Transformers passes the tools."""
    if tools is None or "xml" in form:
        return messages, {"xml_tools": tools} if tools else {}
    if "system-list" not in form and "system-text" not in form:
        return messages, {}
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    return [{**messages[0], "tools": tools if "system-list" in form else text}, *messages[1:]], {}


def as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def as_object(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def transformers_prompt(source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    try:
        (text,), _ = render_jinja_template([messages], chat_template=source, **options, **TOKENS)
    except Exception:
        return None
    return text


def own_prompt(template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> str | None:
    try:
        return template.render(messages, **options)
    except TemplateError:
        return None


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_conversations_render_as_in_transformers(name: str) -> None:
    source = SHAPES[name]
    form = source.split("-#}")[0].split()[1:]
    template = ChatTemplate(source, TOKENS)
    for title, conversation in CONVERSATIONS.items():
        messages = template_messages(msgspec.convert(conversation, list[Message]))
        expected = split_by_hand(template_messages(msgspec.convert(conversation, list[Message])), form)
        prefill = title.startswith("prefill")
        for tools, prompt in ((None, True), (TOOLS, True), (TOOLS, False)):
            options = {"tools": tools, "add_generation_prompt": prompt and not prefill}
            options["continue_final_message"] = prefill and prompt
            own = own_prompt(template, messages, **options)
            given, variables = tools_by_hand(expected, tools, form)
            assert own == transformers_prompt(source, given, **options, **variables), (title, options)
            if tools and own is not None and form[-1:] in (["xml"], ["system-list"], ["system-text"]):
                assert "größer" in own, title
            if "tool_calls" in str(conversation) and (own is not None or conversation[0] != SYSTEM):
                shown = "id0000001" if name == "kimi_k2" else "weather"
                assert own is not None and shown in own, title


DOCUMENTS = [{"doc_id": 1, "text": "Größe <b>", "title": "a"}, {"doc_id": 2, "text": "b", "title": "c"}]
OPTIONS: list[dict[str, Any]] = [
    {"documents": DOCUMENTS},
    {"documents": DOCUMENTS, "tools": TOOLS, "controls": {"citations": "on"}},
    {"thinking": True},
    {"enable_thinking": False},
    {"thinking_budget": 0},
    {"thinking_budget": 600},
]


@pytest.mark.parametrize("name", ["command_a", "ernie45", "granite_documents", "seed_oss_functions"])
def test_documents_and_variables_render_as_in_transformers(name: str) -> None:
    template = ChatTemplate(SHAPES[name], TOKENS)
    prompts: set[str | None] = set()
    for options in OPTIONS:
        options = {"add_generation_prompt": True, "tools": None, **options}
        for title in ("one message", "system", "turns"):
            own = own_prompt(template, CONVERSATIONS[title], **options)
            assert own == transformers_prompt(SHAPES[name], CONVERSATIONS[title], **options), options
        prompts.add(own)
    assert None not in prompts
    assert len(prompts) >= 2


def test_shapes_and_conversations_are_many() -> None:
    assert len(SHAPES) >= 50
    assert len(CONVERSATIONS) >= 20
