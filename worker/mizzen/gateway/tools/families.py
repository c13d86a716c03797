"""Model families by their tool call syntax, and detection of a model's family.

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
from mizzen.gateway.tools.qwen_xml import (
    CALL,
    CALL_END,
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    ArgumentSchemas,
    XmlParser,
)
from mizzen.gateway.tools.structural_tags import Format

_MISTRAL_ID = 9
_BASE36 = string.digits + string.ascii_lowercase


@dataclass(frozen=True, slots=True)
class CallSchema:
    """A tool as grammars need it."""

    name: str
    schema: Format | bool
    """JSON schema of the arguments."""


FormatBuilder = Callable[[Sequence[CallSchema], bool, Tokenizer], Format]
"""Build the format of output from the callable tools, and whether several calls are allowed."""


class ParserFactory(Protocol):
    """Create the parser of one output."""

    def __call__(self, tools: ArgumentSchemas, stop: tuple[str, ...] = (), /) -> ToolParser:
        """Create a parser for the callable tools and the stop strings that end the content."""
        ...


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """Tool call syntax of a model family."""

    name: str
    parser: ParserFactory
    forced: FormatBuilder
    """Builder of the format of output that consists of calls only."""
    free: FormatBuilder
    """Builder of the format of output that may contain calls."""
    shown_tokens: tuple[str, ...] = ()
    """Special tokens that the parser must see in the text."""
    call_id: Callable[[str], str] = str
    """Function that converts a call id to one that the chat template accepts."""


def tool_call(begin: str, call: CallSchema, key: str, end: str) -> Format:
    """Return the format of a call as an object with name and arguments."""
    head = f'{begin}{{"name": {json.dumps(call.name)}, "{key}": '
    return structural_tags.tag(head, structural_tags.json_value(call.schema), "}" + end)


def hermes_call(call: CallSchema) -> Format:
    """Return the format of a call between tags."""
    return tool_call(f"{BEGIN}\n", call, "arguments", f"\n{END}")


def hermes_forced(calls: Sequence[CallSchema], allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """See `ToolFamily.forced`."""
    return structural_tags.separated([*map(hermes_call, calls)], "\n", allow_parallel)


def hermes_free(calls: Sequence[CallSchema], allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """See `ToolFamily.free`."""
    return triggered([*map(hermes_call, calls)], allow_parallel)


def xml_call(call: CallSchema) -> Format:
    """Return the format of a call written as tags."""
    content = {**structural_tags.json_value(call.schema), "style": "qwen_xml", "max_whitespace_cnt": 1}
    return structural_tags.tag(f"{CALL}\n{FUNCTION}{call.name}>\n", content, f"\n{FUNCTION_END}\n{CALL_END}")


def xml_forced(calls: Sequence[CallSchema], allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """See `ToolFamily.forced`."""
    return structural_tags.separated([*map(xml_call, calls)], "\n", allow_parallel)


def xml_free(calls: Sequence[CallSchema], allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """See `ToolFamily.free`."""
    return triggered([*map(xml_call, calls)], allow_parallel)


def triggered(tags: list[Format], allow_parallel: bool) -> Format:
    """Return the format of text in which a tag starts a call."""
    return {
        "type": "triggered_tags",
        "triggers": [BEGIN],
        "tags": tags,
        "stop_after_first": not allow_parallel,
    }


def llama_forced(calls: Sequence[CallSchema], allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """See `ToolFamily.forced`. These models make one call per turn."""
    return structural_tags.separated([tool_call("", call, "parameters", "") for call in calls], "; ", False)


def llama_free(calls: Sequence[CallSchema], allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """See `ToolFamily.free`: the output is a call, or text."""
    return structural_tags.either(
        llama_forced(calls, allow_parallel, tokenizer), structural_tags.any_text('{"name": "')
    )


def mistral_forced(calls: Sequence[CallSchema], allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """See `ToolFamily.forced`."""
    return structural_tags.sequence(
        structural_tags.marker_format(tokenizer, MARKER), bare_list(calls, allow_parallel, tokenizer)
    )


def mistral_free(calls: Sequence[CallSchema], allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """See `ToolFamily.free`: text, followed by calls."""
    listed = mistral_forced(calls, allow_parallel, tokenizer)
    return structural_tags.sequence(structural_tags.any_text(MARKER), structural_tags.optional(listed))


def bare_list(calls: Sequence[CallSchema], allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of a list of calls."""
    items = [tool_call("", call, "arguments", "") for call in calls]
    return structural_tags.sequence(
        structural_tags.text("["),
        structural_tags.separated(items, ", ", allow_parallel),
        structural_tags.text("]"),
    )


def mistral_call_id(call_id: str) -> str:
    """Return nine letters and digits, as Mistral's templates require; an id in that form is unchanged."""
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
"""Family of models whose syntax is unknown: calls can only be forced, as a plain list."""

FAMILIES = {family.name: family for family in (HERMES, QWEN_XML, LLAMA, MISTRAL)}
NAMES = ("auto", "none", *FAMILIES)
"""Values of the option `tool_parser`."""

_FOREIGN_MARKERS = ("<arg_key>", "tool▁call")
"""Strings in templates whose call syntax differs although they use markers of a known family."""


def detect_tool_family(option: str, template: str, tokenizer: Tokenizer) -> ToolFamily | None:
    """Return a model's family: the one that the option names, or the one that its chat template shows."""
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
