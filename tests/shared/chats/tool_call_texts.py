"""Tool calls as the models of each family write them, and strategies that generate such texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from mizzen.gateway.tools.families import BARE, HERMES, LLAMA, MISTRAL, ToolFamily

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


WRITERS: dict[str, tuple[ToolFamily, Callable[[str, Calls], str]]] = {
    "hermes": (HERMES, hermes_text),
    "llama3": (LLAMA, llama_text),
    "mistral": (MISTRAL, mistral_text),
    "mistral-named": (MISTRAL, mistral_named_text),
    "json": (BARE, bare_text),
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
        *("weather>", "unknown>", ">", "\n"),
        *("{", "}", "[", "]", '"', "\\", ",", ":", ";", " ", "\n", "null", "-1.5e3", "text ", "ü", "🙂"),
    ]
)
garbage = st.lists(fragments | st.text(max_size=6), max_size=14).map("".join)


@st.composite
def split_pieces(draw: st.DrawFn, text: str) -> list[str]:
    """Split a text at random positions, and return the pieces."""
    places = draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    return [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]
