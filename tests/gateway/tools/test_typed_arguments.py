# SPDX-License-Identifier: Apache-2.0
"""Calls whose arguments are not JSON: tags whose text the tool's schema converts, and Python's literals."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.gateway.tools.families import (
    COMMAND_R,
    GLM_XML,
    HUNYUAN,
    OLMO,
    PYTHONIC,
    QWEN_XML,
    SEED,
    ToolFamily,
)
from tool_call_texts import TOOLS, garbage, join_deltas, parse, plain_texts, split_pieces

TypedCalls = list[tuple[str, dict[str, Any]]]

texts = st.text('ab \n<>/"\\{}par', max_size=12) | st.sampled_from(["5", "null", "\n", "</parameter", "🙂"])
arguments_by_type = st.fixed_dictionaries(
    {},
    optional={
        "city": texts,
        "days": st.integers(),
        "late": st.booleans() | st.none(),
        "more": st.lists(st.integers() | st.text(max_size=4), max_size=3),
        "unit": st.sampled_from(["C", "F"]),
        "note": texts.filter(lambda text: text.strip() not in ("null", "None")) | st.none(),
        "else": texts,
    },
)
TAGS = [
    *("<parameter=city>", "<parameter=note", "<parameter=more: ", "<parameter=", "</parameter>"),
    *("</parameter/>", "\n", "</function>", "</tool_call>", "<tool_call>", "<function=weather>", "</ para"),
    *(
        "  ",
        "<seed:tool_call>",
        "</seed:tool_call>",
        "<arg_key>days</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    *("<arg_key>", "city", "</arg_key>", "</arg_val", "5"),
]
PYTHON = [
    *("city=", "days", "=", "'a'", '"b"', "5", ",", ")", "(", "[1, 2]", "{'a': True}", "**{", "}", "null"),
    *("None", "\n", "weather(", "'", '"', "\\", "1e999", "b'x'", "'\\ud800'", "-", "x y", "]", "get-time()"),
]


def as_text(value: Any) -> str:
    """Return a value as models write it between tags: strings unquoted, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def tagged_text(begin: str, end: str) -> Callable[[str, TypedCalls], str]:
    """Return a writer of calls in Qwen3-Coder's syntax, with certain outer tags."""

    def write(content: str, calls: TypedCalls) -> str:
        parts = [content]
        for name, arguments in calls:
            written = "".join(
                f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in arguments.items()
            )
            parts.append(f"\n{begin}\n<function={name}>\n{written}</function>\n{end}")
        return "".join(parts)

    return write


def glm_xml_text(content: str, calls: TypedCalls) -> str:
    parts = [content]
    for name, arguments in calls:
        written = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        parts.append(f"\n<tool_call>{name}\n{written}</tool_call>")
    return "".join(parts)


def python_arguments(arguments: dict[str, Any], write: Callable[[Any], str]) -> str:
    return ", ".join(f"{key}={write(value)}" for key, value in arguments.items())


def olmo_text(content: str, calls: TypedCalls) -> str:
    lines = "\n".join(f"{name}({python_arguments(arguments, json.dumps)})" for name, arguments in calls)
    return content + (f"<function_calls>{lines}</function_calls>" if calls else "")


def python_text(content: str, calls: TypedCalls) -> str:
    listed = ", ".join(f"{name}({python_arguments(arguments, repr)})" for name, arguments in calls)
    return f"[{listed}]" if calls else content


WRITERS: dict[str, tuple[ToolFamily, Callable[[str, TypedCalls], str]]] = {
    "qwen3-coder": (QWEN_XML, tagged_text("<tool_call>", "</tool_call>")),
    "seed-oss": (SEED, tagged_text("<seed:tool_call>", "</seed:tool_call>")),
    "glm45": (GLM_XML, glm_xml_text),
    "olmo3": (OLMO, olmo_text),
    "pythonic": (PYTHONIC, python_text),
}


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=120)
@given(data=st.data(), content=plain_texts)
def test_parser_reads_typed_arguments(name: str, data: st.DataObject, content: str) -> None:
    family, write = WRITERS[name]
    calls = data.draw(st.lists(st.tuples(st.just("weather"), arguments_by_type), max_size=3))
    if name == "pythonic":
        content = "" if calls else content.lstrip("[ \n")
    text = write(content, calls)
    found_content, found_calls = parse(family, [text])
    assert [(call, json.loads(arguments)) for call, arguments in found_calls] == calls
    assert found_content.strip(" \n") == content.strip(" \n")
    assert parse(family, list(text)) == (found_content, found_calls)
    assert parse(family, data.draw(split_pieces(text))) == (found_content, found_calls)


@pytest.mark.parametrize("begin", ["<function=weather>", "<tool_call>weather\n"])
@settings(max_examples=120)
@given(text=st.lists(garbage | texts | st.sampled_from(TAGS), max_size=12).map("".join), data=st.data())
def test_arguments_in_tags_are_json_whatever_the_model_writes(
    begin: str, text: str, data: st.DataObject
) -> None:
    families = (QWEN_XML, SEED) if begin.startswith("<func") else (GLM_XML,)
    for family in families:
        check_split(family, begin + text, data)
        for _, arguments in parse(family, [begin + text])[1]:
            assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("family", [OLMO, PYTHONIC], ids=lambda family: family.name)
@settings(max_examples=200)
@given(text=st.lists(garbage | texts | st.sampled_from(PYTHON), max_size=12).map("".join), data=st.data())
def test_literals_become_json_whatever_the_model_writes(
    family: ToolFamily, text: str, data: st.DataObject
) -> None:
    text = ("<function_calls>" if family is OLMO else "[") + "weather(" + text
    check_split(family, text, data)
    parser = family.parser(TOOLS)
    _, calls = join_deltas([parser.feed(text), parser.end()])
    for index, (_, arguments) in enumerate(calls):
        arguments.encode()
        if index < len(calls) - 1 or not parser.call_open:
            assert isinstance(json.loads(arguments), dict)


def check_split(family: ToolFamily, text: str, data: st.DataObject) -> None:
    expected = parse(family, [text])
    assert parse(family, list(text)) == expected
    assert parse(family, data.draw(split_pieces(text))) == expected


TIME = ("get-time", "{}")
DEEP = "[" * 5000
DEEP_LIST = "[" * 5000 + "]" * 5000
DEEP_OBJECT = f'{{"a": {DEEP_LIST}}}'
CASES = [
    (OLMO, "<function_calls>weather(days=2)</function_calls>", ("", [("weather", '{"days": 2}')])),
    (OLMO, "Hm. <function_calls>[get-time(), get-time()]</function_calls>", ("Hm.", [TIME, TIME])),
    (OLMO, "<function_calls>weather(late=true, days=1)", ("", [("weather", '{"late": true, "days": 1}')])),
    (OLMO, '<function_calls>weather(**{"days": 2})\n</function_calls>', ("", [("weather", '{"days": 2}')])),
    (OLMO, "<function_calls>weather(city='a', 5)", ("", [("weather", '{"city": "a", "days": 5}')])),
    (OLMO, "<function_calls>unknown(a=1)</function_calls>", ("unknown(a=1)", [])),
    (OLMO, "<function_calls>weather(city=Köln)", ("", [("weather", '{"city": "Köln"}')])),
    (OLMO, "<function_calls>weather(city='a\nb')", ("", [("weather", '{"city": "a\\nb"}')])),
    (OLMO, "<function_calls>weather(city='a\\'b, (')", ("", [("weather", '{"city": "a\'b, ("}')])),
    (OLMO, "<function_calls>weather(days=1, days=2)", ("", [("weather", '{"days": 1}')])),
    (OLMO, "<function_calls>weather('a')", ("weather('a')", [])),
    (PYTHONIC, "[weather(more=[{'a': None}])]", ("", [("weather", '{"more": [{"a": null}]}')])),
    (PYTHONIC, "<|python_start|>[get-time()]<|python_end|>", ("", [("get-time", "{}")])),
    (PYTHONIC, "[1, 2]", ("[1, 2]", [])),
    (PYTHONIC, "[weather is fine]", ("[weather is fine]", [])),
    (PYTHONIC, "See [get-time()]", ("See [get-time()]", [])),
    (PYTHONIC, f"[weather(more={DEEP})]", ("", [("weather", f'{{"more": {DEEP})]')])),
    (PYTHONIC, "[weather(days=1, city='Kö", ("", [("weather", '{"days": 1, "city": \'Kö')])),
    (PYTHONIC, '[weather(city="""it("hi, you")\nx = 1""", days=1)]',
     ("", [("weather", '{"city": "it(\\"hi, you\\")\\nx = 1", "days": 1}')])),
    (PYTHONIC, "[weather(city='''it's (a, b)''', note='', days=1)]",
     ("", [("weather", '{"city": "it\'s (a, b)", "note": "", "days": 1}')])),
    (PYTHONIC, '[weather(more={"a": "b\nc"})]', ("", [("weather", '{"more": {"a": "b\\nc"}}')])),
    (PYTHONIC, "[weather(more={'a': 'b\nc',\n'd': None})]",
     ("", [("weather", '{"more": {"a": "b\\nc", "d": null}}')])),
    (PYTHONIC, '[weather(**{"city": "a\nb"})]', ("", [("weather", '{"city": "a\\nb"}')])),
    (PYTHONIC, "[weather(**city)]", ("", [("weather", '{"argument_1": "city"}')])),
    (PYTHONIC, f'[weather(days=1, **{{"a": {DEEP_LIST}}})]',
     ("", [("weather", f'{{"days": 1, "argument_2": {json.dumps(DEEP_OBJECT)}}}')])),
    (COMMAND_R, 'Action: ```json\n{"x": 1}\n```', ('Action: ```json\n{"x": 1}\n```', [])),
    (COMMAND_R, 'Action: ```json\n[{"tool_name": "directly-answer", "parameters": {}}]\n```', ("", [])),
    (COMMAND_R, 'Action: ```json\n[{"tool_name": "get-time", "parameters": {}}]\n```\n```py\n1\n```',
     ("```py\n1\n```", [TIME])),
    (HUNYUAN, "<tool_calls><tool_call>get-time\n{}</tool_call></tool_calls>\n```py\n1```",
     ("```py\n1```", [TIME])),
    (HUNYUAN, "<tool_call>get-time\n```json\n{}\n```</tool_call>\n```py\n1```", ("```py\n1```", [TIME])),
    (GLM_XML, "The tag <arg_key> is used", ("The tag <arg_key> is used", [])),
    (GLM_XML, "a <tool_call>get-time</tool_call>", ("a", [("get-time", "{}")])),
    (GLM_XML, "<tool_call>weather<arg_key>days</arg_key><arg_value>5", ("", [("weather", '{"days": 5}')])),
    (GLM_XML, "<tool_call>weather\n<arg_key>days", ("", [("weather", "{}")])),
    (GLM_XML, "<tool_call>unknown\n</tool_call>", ("unknown\n", [])),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "expected"), CASES)
def test_parser_handles_unusual_calls(family: ToolFamily, text: str, expected: Any) -> None:
    assert parse(family, [text]) == expected
    assert parse(family, list(text)) == expected


@pytest.mark.parametrize(
    ("family", "begin"),
    [(PYTHONIC, "[weather("), (GLM_XML, "<tool_call>weather<arg_key>days</arg_key>")],
)
def test_time_is_linear_in_the_amount_of_white_space(family: ToolFamily, begin: str) -> None:
    parser = family.parser(TOOLS)
    parser.feed(begin)
    started = time.process_time()
    for _ in range(8_000):
        parser.feed(" " * 64)
    assert time.process_time() - started < 2
