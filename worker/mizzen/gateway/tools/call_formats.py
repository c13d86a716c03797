# SPDX-License-Identifier: Apache-2.0
"""Output formats of tool calls, from which grammars are built: a format of calls only, and one of free text.

Each function takes the tools that may be called, whether several calls are allowed, and the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.gateway.tools import structural_tags
from mizzen.gateway.tools.parsers.hermes import BEGIN, END
from mizzen.gateway.tools.parsers.mistral import MARKER
from mizzen.gateway.tools.parsers.qwen_xml_tags import (
    CALL,
    CALL_END,
    FUNCTION,
    FUNCTION_END,
    SEED_CALL,
    SEED_CALL_END,
)
from mizzen.gateway.tools.structural_tags import Format


@dataclass(frozen=True, slots=True)
class CallSchema:
    """Name and argument schema of a tool, from which grammars are built."""

    name: str
    schema: Format | bool
    """JSON schema of the arguments."""


Calls = Sequence[CallSchema]
FormatBuilder = Callable[[Calls, bool, Tokenizer], Format]
"""Function that builds an output format."""


def tool_call(begin: str, call: CallSchema, key: str, end: str) -> Format:
    """Return the format of a call: a JSON object between `begin` and `end`; `key` holds the arguments."""
    head = f'{begin}{{"name": {json.dumps(call.name)}, "{key}": '
    return structural_tags.tag(head, structural_tags.json_value(call.schema), "}" + end)


def hermes_call(call: CallSchema) -> Format:
    """Return the format of a call in Hermes' syntax: a JSON object between tags."""
    return tool_call(f"{BEGIN}\n", call, "arguments", f"\n{END}")


def xml_call(call: CallSchema, begin: str = CALL, end: str = CALL_END) -> Format:
    """Return the format of a call in Qwen3-Coder's syntax: tags for the function and each argument."""
    content = {**structural_tags.json_value(call.schema), "style": "qwen_xml", "max_whitespace_cnt": 1}
    return structural_tags.tag(f"{begin}\n{FUNCTION}{call.name}>\n", content, f"\n{FUNCTION_END}\n{end}")


def seed_call(call: CallSchema) -> Format:
    """Return the format of a call in Seed-OSS's syntax, which has other outer tags than Qwen3-Coder's."""
    return xml_call(call, SEED_CALL, SEED_CALL_END)


def glm_xml_call(call: CallSchema) -> Format:
    """Return the format of a call in GLM-4.5's syntax: a name, and tags for each key and value."""
    content = {**structural_tags.json_value(call.schema), "style": "glm_xml", "max_whitespace_cnt": 1}
    return structural_tags.tag(f"{CALL}{call.name}\n", content, f"\n{CALL_END}")


def tagged_formats(
    build: Callable[[CallSchema], Format], begin: str = CALL
) -> tuple[FormatBuilder, FormatBuilder]:
    """Return the formats of calls only and of free text, for calls that each start with the tag `begin`."""

    def forced(calls: Calls, allow_parallel: bool, tokenizer: Tokenizer) -> Format:
        return structural_tags.separated([*map(build, calls)], "\n", allow_parallel)

    def free(calls: Calls, allow_parallel: bool, tokenizer: Tokenizer) -> Format:
        return {
            "type": "triggered_tags",
            "triggers": [begin],
            "tags": [*map(build, calls)],
            "stop_after_first": not allow_parallel,
        }

    return forced, free


def llama_forced(calls: Calls, allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of output that is a single call, because Llama 3 makes one call per turn."""
    return structural_tags.separated([tool_call("", call, "parameters", "") for call in calls], "; ", False)


def llama_free(calls: Calls, allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of output that is either a single call or text."""
    return structural_tags.either(
        llama_forced(calls, allow_parallel, tokenizer), structural_tags.any_text('{"name": "')
    )


def glm_forced(calls: Calls, allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of output that is a single call in GLM-4's syntax: a name, and then arguments.

    Several calls would be several messages, which a grammar cannot separate by text.
    """
    named = [
        structural_tags.sequence(
            structural_tags.text(f"{call.name}\n"), structural_tags.json_value(call.schema)
        )
        for call in calls
    ]
    return structural_tags.either(*named)


def glm_free(calls: Calls, allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of output that is either a single call or text."""
    heads = [f"{call.name}\n{{" for call in calls]
    return structural_tags.either(
        glm_forced(calls, allow_parallel, tokenizer), structural_tags.any_text(*heads)
    )


def bare_list(calls: Calls, allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of a JSON list of calls."""
    items = [tool_call("", call, "arguments", "") for call in calls]
    return structural_tags.sequence(
        structural_tags.text("["),
        structural_tags.separated(items, ", ", allow_parallel),
        structural_tags.text("]"),
    )


def command_r_list(calls: Calls, allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of a JSON list of calls in Command R's syntax, which is in a code block."""
    items = [
        structural_tags.tag(
            f'    {{\n        "tool_name": {json.dumps(call.name)},\n        "parameters": ',
            structural_tags.json_value(call.schema),
            "\n    }",
        )
        for call in calls
    ]
    return structural_tags.sequence(
        structural_tags.text("\n[\n"),
        structural_tags.separated(items, ",\n", allow_parallel),
        structural_tags.text("\n]\n"),
    )


def cohere_list(calls: Calls, allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of a JSON list of calls in Cohere's syntax, with the white space of its templates."""
    items = [
        structural_tags.sequence(
            structural_tags.text('    {"tool_call_id": "'),
            {"type": "regex", "pattern": "[0-9]{1,4}"},
            structural_tags.text(f'", "tool_name": {json.dumps(call.name)}, "parameters": '),
            structural_tags.json_value(call.schema),
            structural_tags.text("}"),
        )
        for call in calls
    ]
    return structural_tags.sequence(
        structural_tags.text("[\n"),
        structural_tags.repeated(items, ",\n", allow_parallel),
        structural_tags.text("\n]"),
    )


def marked_formats(
    begin: str, end: str = "", listed: FormatBuilder = bare_list
) -> tuple[FormatBuilder, FormatBuilder]:
    """Return the formats of calls only and of free text, for a list of calls between two markers.

    `listed` builds the format of the list; an empty `end` means that no marker follows the list.
    """

    def forced(calls: Calls, allow_parallel: bool, tokenizer: Tokenizer) -> Format:
        last = [structural_tags.marker_format(tokenizer, end)] if end else []
        first = structural_tags.marker_format(tokenizer, begin)
        return structural_tags.sequence(first, listed(calls, allow_parallel, tokenizer), *last)

    def free(calls: Calls, allow_parallel: bool, tokenizer: Tokenizer) -> Format:
        calls_only = forced(calls, allow_parallel, tokenizer)
        return structural_tags.sequence(structural_tags.any_text(begin), structural_tags.optional(calls_only))

    return forced, free


MISTRAL_FORMATS = marked_formats(MARKER)
COMMAND_R_FORMATS = marked_formats("Action: ```json", "```", command_r_list)
