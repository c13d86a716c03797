"""Model families, each with its own syntax of tool calls, and detection of a model's family.

A new family is added here: its parser, its grammar formats, and its detection in `detect_tool_family`.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.gateway.tools import structural_tags
from mizzen.gateway.tools.hermes import BEGIN, END, HermesParser
from mizzen.gateway.tools.llama import TAG, LlamaParser
from mizzen.gateway.tools.mistral import MARKER, BareListParser, MistralParser
from mizzen.gateway.tools.parser_base import ToolParser
from mizzen.gateway.tools.qwen_xml import ArgumentSchemas, XmlParser
from mizzen.gateway.tools.qwen_xml_tags import CALL, CALL_END, FUNCTION, FUNCTION_END, PARAMETER
from mizzen.gateway.tools.structural_tags import Format

_MISTRAL_ID = 9
_BASE36 = string.digits + string.ascii_lowercase


@dataclass(frozen=True, slots=True)
class CallSchema:
    """Name and argument schema of a tool, from which grammars are built."""

    name: str
    schema: Format | bool
    """JSON schema of the arguments."""


FormatBuilder = Callable[[Sequence[CallSchema], bool, Tokenizer], Format]
"""Function that builds an output format.

Its arguments are the tools that may be called, whether several calls are allowed, and the tokenizer.
"""


class ParserFactory(Protocol):
    """Factory of tool parsers; a parser handles a single output."""

    def __call__(self, tools: ArgumentSchemas, stop: tuple[str, ...] = (), /) -> ToolParser:
        """Create a parser, given the tools that may be called and the stop strings that end the content."""
        ...


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """Tool call syntax of a model family."""

    name: str
    parser: ParserFactory
    forced: FormatBuilder
    """Builder of the format of output that consists only of calls."""
    free: FormatBuilder
    """Builder of the format of output that may contain calls."""
    shown_tokens: tuple[str, ...] = ()
    """Special tokens that detokenization must leave in the text, because the parser needs them."""
    call_id: Callable[[str], str] = str
    """Function that converts a call id to one that the chat template accepts."""


def tool_call(begin: str, call: CallSchema, key: str, end: str) -> Format:
    """Return the format of a call: a JSON object between `begin` and `end`; `key` holds the arguments."""
    head = f'{begin}{{"name": {json.dumps(call.name)}, "{key}": '
    return structural_tags.tag(head, structural_tags.json_value(call.schema), "}" + end)


def hermes_call(call: CallSchema) -> Format:
    """Return the format of a call in Hermes' syntax: a JSON object between tags."""
    return tool_call(f"{BEGIN}\n", call, "arguments", f"\n{END}")


def hermes_forced(calls: Sequence[CallSchema], allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of output that consists only of calls in Hermes' syntax."""
    return structural_tags.separated([*map(hermes_call, calls)], "\n", allow_parallel)


def hermes_free(calls: Sequence[CallSchema], allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of free text that may contain calls in Hermes' syntax."""
    return triggered([*map(hermes_call, calls)], allow_parallel)


def xml_call(call: CallSchema) -> Format:
    """Return the format of a call in Qwen3-Coder's syntax: tags for the function and each argument."""
    content = {**structural_tags.json_value(call.schema), "style": "qwen_xml", "max_whitespace_cnt": 1}
    return structural_tags.tag(f"{CALL}\n{FUNCTION}{call.name}>\n", content, f"\n{FUNCTION_END}\n{CALL_END}")


def xml_forced(calls: Sequence[CallSchema], allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of output that consists only of calls in Qwen3-Coder's syntax."""
    return structural_tags.separated([*map(xml_call, calls)], "\n", allow_parallel)


def xml_free(calls: Sequence[CallSchema], allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of free text that may contain calls in Qwen3-Coder's syntax."""
    return triggered([*map(xml_call, calls)], allow_parallel)


def triggered(tags: list[Format], allow_parallel: bool) -> Format:
    """Return the format of free text that may contain calls; each call starts with `<tool_call>`."""
    return {
        "type": "triggered_tags",
        "triggers": [BEGIN],
        "tags": tags,
        "stop_after_first": not allow_parallel,
    }


def llama_forced(calls: Sequence[CallSchema], allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of output that is a single call, because Llama 3 makes one call per turn."""
    return structural_tags.separated([tool_call("", call, "parameters", "") for call in calls], "; ", False)


def llama_free(calls: Sequence[CallSchema], allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of output that is either a single call or text."""
    return structural_tags.either(
        llama_forced(calls, allow_parallel, tokenizer), structural_tags.any_text('{"name": "')
    )


def mistral_forced(calls: Sequence[CallSchema], allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of output that consists of Mistral's marker and a list of calls."""
    return structural_tags.sequence(
        structural_tags.marker_format(tokenizer, MARKER), bare_list(calls, allow_parallel, tokenizer)
    )


def mistral_free(calls: Sequence[CallSchema], allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of text that may be followed by Mistral's marker and a list of calls."""
    listed = mistral_forced(calls, allow_parallel, tokenizer)
    return structural_tags.sequence(structural_tags.any_text(MARKER), structural_tags.optional(listed))


def bare_list(calls: Sequence[CallSchema], allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of a JSON list of calls."""
    items = [tool_call("", call, "arguments", "") for call in calls]
    return structural_tags.sequence(
        structural_tags.text("["),
        structural_tags.separated(items, ", ", allow_parallel),
        structural_tags.text("]"),
    )


def mistral_call_id(call_id: str) -> str:
    """Convert a call id to nine letters and digits, as Mistral's templates require.

    An id that has this form is returned unchanged.
    """
    if len(call_id) == _MISTRAL_ID and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest()[:8])
    return "".join(_BASE36[number // 36**place % 36] for place in range(_MISTRAL_ID))


HERMES = ToolFamily("hermes", HermesParser, hermes_forced, hermes_free)
QWEN_XML = ToolFamily("qwen3-coder", XmlParser, xml_forced, xml_free)
LLAMA = ToolFamily("llama3", LlamaParser, llama_forced, llama_free, shown_tokens=(TAG,))
MISTRAL = ToolFamily(
    "mistral",
    MistralParser,
    mistral_forced,
    mistral_free,
    shown_tokens=MistralParser.markers,
    call_id=mistral_call_id,
)
BARE = ToolFamily("json", BareListParser, bare_list, bare_list)
"""Family of models whose syntax is unknown: only forced calls are supported, written as a JSON list."""

FAMILIES = {family.name: family for family in (HERMES, QWEN_XML, LLAMA, MISTRAL)}
NAMES = ("auto", "none", *FAMILIES)
"""Values of the option `tool_parser`."""

_FOREIGN_MARKERS = ("<arg_key>", "tool▁call")
"""Strings that identify chat templates of unsupported families; these templates also contain markers of a
supported family."""


def detect_tool_family(option: str, template: str, tokenizer: Tokenizer) -> ToolFamily | None:
    """Return the tool family of a model; None if the family is unknown or `option` is "none".

    `option` names the family; "auto" detects it from the chat template and the tokenizer.
    """
    if option != "auto":
        return FAMILIES.get(option)
    if any(other in template for other in _FOREIGN_MARKERS):
        return None
    if MARKER in template or (tokenizer.token_id(MARKER) is not None and "AVAILABLE_TOOLS" in template):
        return MISTRAL
    if FUNCTION in template and PARAMETER in template:
        return QWEN_XML
    if BEGIN in template and FUNCTION not in template:
        return HERMES
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return LLAMA
    return None
