# SPDX-License-Identifier: Apache-2.0
"""Tool calls as the models of each family write them, strategies that generate such texts, and parsing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from mizzen.gateway.requests.output import OutputDelta
from mizzen.gateway.tools.families import (
    BARE,
    COHERE,
    COMMAND_R,
    GLM,
    GRANITE,
    HERMES,
    HUNYUAN,
    LLAMA,
    MISTRAL,
    PHI4_MINI,
    ToolFamily,
)

TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "late": {"type": ["boolean", "null"]},
            "more": {"anyOf": [{"type": "array"}, {"type": "object"}]},
            "unit": {"enum": ["C", "F"]},
            "note": {"type": ["string", "null"]},
        },
    },
    "add_2": {},
    "get-time": {},
}
NAMES = tuple(TOOLS)
Calls = list[tuple[str, str]]
Parsed = tuple[str, Calls]


def hermes_text(content: str, calls: Calls) -> str:
    written = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    ]
    return "\n".join([content, *written]) if content else "\n".join(written)


def llama_text(content: str, calls: Calls) -> str:
    written = "; ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in calls)
    return f"{content}<|python_tag|>{written}" if content and calls else content + written


def mistral_text(content: str, calls: Calls) -> str:
    written = ", ".join(f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls)
    return f"{content}[TOOL_CALLS] [{written}]" if calls else content


def mistral_named_text(content: str, calls: Calls) -> str:
    written = [f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls]
    return content + "".join(written)


def bare_text(content: str, calls: Calls) -> str:
    written = ",".join(f'{{"name":"{name}","arguments":{arguments}}}' for name, arguments in calls)
    return f"[{written}]" if calls else ""


def json_list(calls: Calls) -> str:
    return (
        "[" + ", ".join(f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls) + "]"
    )


def granite_text(content: str, calls: Calls) -> str:
    return content + (f"<|tool_call|>{json_list(calls)}" if calls else "")


def phi4_mini_text(content: str, calls: Calls) -> str:
    return content + (f"<|tool_call|>{json_list(calls)}<|/tool_call|>" if calls else "")


def cohere_text(content: str, calls: Calls) -> str:
    written = [
        f'    {{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {arguments}}}'
        for number, (name, arguments) in enumerate(calls)
    ]
    listed = ",\n".join(written)
    return content + (f"<|START_ACTION|>[\n{listed}\n]<|END_ACTION|>" if calls else "")


def command_r_text(content: str, calls: Calls) -> str:
    written = [
        f'    {{\n        "tool_name": "{name}",\n        "parameters": {arguments}\n    }}'
        for name, arguments in calls
    ]
    listed = ",\n".join(written)
    return content + (f"\nAction: ```json\n[\n{listed}\n]\n```" if calls else "")


def hunyuan_text(content: str, calls: Calls) -> str:
    return content + (f"<tool_calls>{json_list(calls)}</tool_calls>" if calls else "")


def hunyuan_named_text(content: str, calls: Calls) -> str:
    written = [f"<tool_call>{name}\n```json\n{arguments}\n```</tool_call>" for name, arguments in calls]
    return content + (f"<tool_calls>{''.join(written)}</tool_calls>" if calls else "")


def glm_text(content: str, calls: Calls) -> str:
    written = "<|assistant|>".join(f"{name}\n{arguments}" for name, arguments in calls)
    return f"{content}<|assistant|>{written}" if content and calls else content + written


WRITERS: dict[str, tuple[ToolFamily, Callable[[str, Calls], str]]] = {
    "hermes": (HERMES, hermes_text),
    "llama3": (LLAMA, llama_text),
    "mistral": (MISTRAL, mistral_text),
    "mistral-named": (MISTRAL, mistral_named_text),
    "json": (BARE, bare_text),
    "granite": (GRANITE, granite_text),
    "phi4-mini": (PHI4_MINI, phi4_mini_text),
    "cohere": (COHERE, cohere_text),
    "command-r": (COMMAND_R, command_r_text),
    "hunyuan": (HUNYUAN, hunyuan_text),
    "hunyuan-named": (HUNYUAN, hunyuan_named_text),
    "glm4": (GLM, glm_text),
}
MARKERS = (
    "<function=",
    "</function>",
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<tool_calls>",
    "</tool_calls>",
    "<|assistant|>",
    "<|observation|>",
    "<function_calls>",
    "</function_calls>",
    "Action: ```json",
)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from([*MARKERS, '"}', '{"', "\\", "}\n</tool_call>", "]", "; ", "ü🙂"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
arguments = st.builds(
    json.dumps,
    st.dictionaries(st.text(max_size=6), values, max_size=4),
    ensure_ascii=st.booleans(),
    indent=st.sampled_from([None, None, 2]),
)
made_calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), max_size=3)
plain_texts = st.text("abc <>[]{}|\"'\n.,;:tool_calTOOL/", max_size=30).filter(
    lambda text: not any(marker in text for marker in MARKERS)
)
fragments = st.sampled_from(
    [
        *MARKERS,
        *(marker[:cut] for marker in MARKERS for cut in (1, 4, len(marker) - 1)),
        *('{"name": "weather", "arguments": {', '{"name": "weather", "parameters": {"a": 1}}', '{"a": "'),
        *('{"name": "unknown", "arguments": {}}', '"arguments": "{}"', '"name": "add_2"', "weather{", "{}"),
        *("<parameter=city>", "<parameter=days>", "<parameter=", "</parameter>", "</para", "\n</parameter>"),
        *(
            "weather>",
            "unknown>",
            ">",
            "\n",
            "```",
            "weather\n",
            "add_2",
            "[weather(",
            "weather(city=",
            "get-time()",
        ),
        *('"tool_name": "add_2"', "city", "(", ")", "='x'", ", days=3)", "**", "<arg_key>city</arg_key>"),
        *("{", "}", "[", "]", '"', "\\", ",", ":", ";", " ", "\n", "null", "-1.5e3", "text ", "ü", "🙂"),
    ]
)
garbage = st.lists(fragments | st.text(max_size=6), max_size=14).map("".join)


@st.composite
def split_pieces(draw: st.DrawFn, text: str) -> list[str]:
    """Split a text at random positions, and return the pieces."""
    places = draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    return [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]


def join_deltas(deltas: Sequence[OutputDelta]) -> Parsed:
    """Return the content and calls of all deltas, and check that they are ordered as OpenAI streams them."""
    content = "".join(delta.content for delta in deltas)
    calls: Calls = []
    ids: set[str] = set()
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        if piece.id is not None:
            assert piece.id.startswith("call_")
            assert piece.name is not None
            assert piece.index == len(calls)
            ids.add(piece.id)
            calls.append((piece.name, piece.arguments))
        else:
            assert piece.index == len(calls) - 1
            assert piece.arguments
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    assert len(ids) == len(calls)
    return content, calls


def parse(family: ToolFamily, pieces: Sequence[str]) -> Parsed:
    """Return the content and the calls that a family's parser finds in the pieces of an output."""
    parser = family.parser(TOOLS)
    deltas = [parser.feed(piece) for piece in pieces]
    deltas.append(parser.end())
    output = join_deltas(deltas)
    assert parser.call_count == len(output[1])
    return output
