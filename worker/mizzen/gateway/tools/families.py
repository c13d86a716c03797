"""The families of models by how they write tool calls, and which one a model belongs to."""

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
    Schemas,
    XmlParser,
)
from mizzen.gateway.tools.structural_tags import Format

_MISTRAL_ID = 9
_BASE36 = string.digits + string.ascii_lowercase


@dataclass(frozen=True, slots=True)
class CallSchema:
    """A tool as a grammar sees it."""

    name: str
    schema: Format | bool
    """JSON schema of its arguments."""


GrammarBuilder = Callable[[Sequence[CallSchema], bool, Tokenizer], Format]
"""From the tools that may be called, and whether several calls may be made, to what an answer looks like."""


class ParserMaker(Protocol):
    """Makes a parser for one answer."""

    def __call__(self, tools: Schemas, stop: tuple[str, ...] = (), /) -> ToolParser:
        """Take the tools that may be called, and strings that end the content."""
        ...


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """How the models of a family write calls."""

    name: str
    parser: ParserMaker
    forced: GrammarBuilder
    """An answer that is calls and nothing else."""
    free: GrammarBuilder
    """An answer that may hold calls."""
    shown_tokens: tuple[str, ...] = ()
    """Special tokens that the parser must see in the text."""
    call_id: Callable[[str], str] = str
    """Turns a call's id into one that the chat template takes."""


def tool_call(begin: str, call: CallSchema, key: str, end: str) -> Format:
    """Return the format of a call as an object of name and arguments."""
    head = f'{begin}{{"name": {json.dumps(call.name)}, "{key}": '
    return structural_tags.tag(head, structural_tags.json_value(call.schema), "}" + end)


def hermes_call(call: CallSchema) -> Format:
    """Return the format of a call between tags."""
    return tool_call(f"{BEGIN}\n", call, "arguments", f"\n{END}")


def hermes_forced(calls: Sequence[CallSchema], many: bool, tokenizer: Tokenizer) -> Format:
    """See `ToolFamily.forced`."""
    return structural_tags.separated([*map(hermes_call, calls)], "\n", many)


def hermes_free(calls: Sequence[CallSchema], many: bool, tokenizer: Tokenizer) -> Format:
    """See `ToolFamily.free`."""
    return triggered([*map(hermes_call, calls)], many)


def xml_call(call: CallSchema) -> Format:
    """Return the format of a call as tags."""
    content = {**structural_tags.json_value(call.schema), "style": "qwen_xml", "max_whitespace_cnt": 1}
    return structural_tags.tag(f"{CALL}\n{FUNCTION}{call.name}>\n", content, f"\n{FUNCTION_END}\n{CALL_END}")


def xml_forced(calls: Sequence[CallSchema], many: bool, tokenizer: Tokenizer) -> Format:
    """See `ToolFamily.forced`."""
    return structural_tags.separated([*map(xml_call, calls)], "\n", many)


def xml_free(calls: Sequence[CallSchema], many: bool, tokenizer: Tokenizer) -> Format:
    """See `ToolFamily.free`."""
    return triggered([*map(xml_call, calls)], many)


def triggered(tags: list[Format], many: bool) -> Format:
    """Return the format of text in which calls begin with a tag."""
    return {
        "type": "triggered_tags",
        "triggers": [BEGIN],
        "tags": tags,
        "stop_after_first": not many,
    }


def llama_forced(calls: Sequence[CallSchema], many: bool, tokenizer: Tokenizer) -> Format:
    """See `ToolFamily.forced`; these models make one call a turn."""
    return structural_tags.separated([tool_call("", call, "parameters", "") for call in calls], "; ", False)


def llama_free(calls: Sequence[CallSchema], many: bool, tokenizer: Tokenizer) -> Format:
    """See `ToolFamily.free`: the answer is a call, or text."""
    return structural_tags.either(
        llama_forced(calls, many, tokenizer), structural_tags.any_text('{"name": "')
    )


def mistral_forced(calls: Sequence[CallSchema], many: bool, tokenizer: Tokenizer) -> Format:
    """See `ToolFamily.forced`."""
    return structural_tags.sequence(
        structural_tags.marked(tokenizer, MARKER), bare_list(calls, many, tokenizer)
    )


def mistral_free(calls: Sequence[CallSchema], many: bool, tokenizer: Tokenizer) -> Format:
    """See `ToolFamily.free`: text, then calls."""
    listed = mistral_forced(calls, many, tokenizer)
    return structural_tags.sequence(structural_tags.any_text(MARKER), structural_tags.optional(listed))


def bare_list(calls: Sequence[CallSchema], many: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of a list of calls."""
    items = [tool_call("", call, "arguments", "") for call in calls]
    return structural_tags.sequence(
        structural_tags.text("["), structural_tags.separated(items, ", ", many), structural_tags.text("]")
    )


def mistral_call_id(given: str) -> str:
    """Return the nine letters and digits that Mistral's templates want; an id in that form stays."""
    if len(given) == _MISTRAL_ID and given.isascii() and given.isalnum():
        return given
    number = int.from_bytes(hashlib.sha256(given.encode()).digest()[:8])
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
"""For models of no known family: calls can only be forced, as a plain list."""

FAMILIES = {family.name: family for family in (HERMES, QWEN_XML, LLAMA, MISTRAL)}
NAMES = ("auto", "none", *FAMILIES)
"""Values of the option `tool_parser`."""

_OTHERS = ("<arg_key>", "tool▁call")
"""In templates whose calls look different although they use markers of a known family."""


def tool_family(option: str, template: str, tokenizer: Tokenizer) -> ToolFamily | None:
    """Return a model's family: the one that the option names, or what its template's text shows."""
    if option != "auto":
        return FAMILIES.get(option)
    if any(other in template for other in _OTHERS):
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
