# SPDX-License-Identifier: Apache-2.0
"""Model families, each with its own syntax of tool calls, and detection of a model's family.

A new family needs a parser (`parsers`), output formats (`call_formats`), an entry in `FAMILIES`, and a rule
in `_RULES` by which its models are detected.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.gateway.tools import call_formats as formats
from mizzen.gateway.tools import python_formats
from mizzen.gateway.tools.call_formats import FormatBuilder
from mizzen.gateway.tools.parser_base import ArgumentSchemas, MarkerParser, ToolParser
from mizzen.gateway.tools.parsers import glm, glm_xml, lists, pythonic
from mizzen.gateway.tools.parsers.hermes import BEGIN, HermesParser
from mizzen.gateway.tools.parsers.llama import LlamaParser
from mizzen.gateway.tools.parsers.mistral import MARKER, MistralParser
from mizzen.gateway.tools.parsers.qwen_xml import XmlParser
from mizzen.gateway.tools.parsers.qwen_xml_tags import FUNCTION, PARAMETER, SEED_CALL

_MISTRAL_ID = 9
_BASE36 = string.digits + string.ascii_lowercase


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


def mistral_call_id(call_id: str) -> str:
    """Convert a call id to nine letters and digits, as Mistral's templates require.

    An id that has this form is returned unchanged.
    """
    if len(call_id) == _MISTRAL_ID and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest()[:8])
    return "".join(_BASE36[number // 36**place % 36] for place in range(_MISTRAL_ID))


def marker_family(
    name: str,
    parser: type[MarkerParser],
    forced: FormatBuilder,
    free: FormatBuilder,
    *,
    call_id: Callable[[str], str] = str,
) -> ToolFamily:
    """Return a family whose parser needs all its markers, even if they are special tokens."""
    return ToolFamily(name, parser, forced, free, shown_tokens=parser.markers, call_id=call_id)


HERMES = ToolFamily("hermes", HermesParser, *formats.tagged_formats(formats.hermes_call))
QWEN_XML = ToolFamily("qwen3-coder", XmlParser, *formats.tagged_formats(formats.xml_call))
LLAMA = marker_family("llama3", LlamaParser, formats.llama_forced, formats.llama_free)
MISTRAL = marker_family("mistral", MistralParser, *formats.MISTRAL_FORMATS, call_id=mistral_call_id)
GRANITE = marker_family("granite", lists.GraniteParser, *formats.marked_formats("<|tool_call|>"))
PHI4_MINI = marker_family(
    "phi4-mini", lists.GraniteParser, *formats.marked_formats("<|tool_call|>", "<|/tool_call|>")
)
COHERE = marker_family(
    "cohere",
    lists.CohereParser,
    *formats.marked_formats("<|START_ACTION|>", "<|END_ACTION|>", formats.cohere_list),
)
COMMAND_R = ToolFamily("command-r", lists.CommandRParser, *formats.COMMAND_R_FORMATS)
HUNYUAN = marker_family(
    "hunyuan", lists.HunyuanParser, *formats.marked_formats("<tool_calls>", "</tool_calls>")
)
GLM = marker_family("glm4", glm.GlmParser, formats.glm_forced, formats.glm_free)
GLM_XML = ToolFamily(
    "glm45",
    glm_xml.GlmXmlParser,
    *formats.tagged_formats(formats.glm_xml_call),
    shown_tokens=glm_xml.TAGS,
)
SEED = marker_family("seed-oss", XmlParser, *formats.tagged_formats(formats.seed_call, SEED_CALL))
OLMO = marker_family("olmo3", pythonic.OlmoParser, *python_formats.OLMO_FORMATS)
PYTHONIC = marker_family(
    "pythonic", pythonic.PythonicParser, python_formats.python_list, python_formats.python_free
)
BARE = ToolFamily("json", lists.BareListParser, formats.bare_list, formats.bare_list)
"""Family of models whose syntax is unknown: only forced calls are supported, written as a JSON list."""

FAMILIES = {
    family.name: family
    for family in (
        *(HERMES, QWEN_XML, LLAMA, MISTRAL, GRANITE, PHI4_MINI, COHERE),
        *(COMMAND_R, HUNYUAN, GLM, GLM_XML, SEED, OLMO, PYTHONIC),
    )
}
HARMONY_NAMES = ("gpt-oss", "openai")
"""Names of gpt-oss's format, whose parser finds reasoning, too (`mizzen.gateway.harmony`)."""
NAMES = ("auto", "none", *FAMILIES, *HARMONY_NAMES)
"""Values of the option `tool_parser`."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """Rule that detects a family by strings in the chat template."""

    family: ToolFamily | None
    """Family of the models; None if it is unsupported."""
    contains: tuple[str, ...]
    """Strings that the template must contain."""
    lacks: tuple[str, ...] = ()
    """Strings that the template must not contain."""
    token: str | None = None
    """Token that the tokenizer must have."""

    def matches(self, template: str, tokenizer: Tokenizer) -> bool:
        """Return whether the rule holds for a model."""
        found = all(part in template for part in self.contains)
        found = found and not any(part in template for part in self.lacks)
        return found and (self.token is None or tokenizer.token_id(self.token) is not None)


_RULES = (
    _Rule(None, ("tool▁call",)),
    _Rule(None, ("<arg_key>", "<tool_sep>")),
    _Rule(GLM_XML, ("<arg_key>",)),
    _Rule(SEED, (SEED_CALL,)),
    _Rule(COHERE, ("<|START_ACTION|>",)),
    _Rule(COMMAND_R, ("Action:", "tool_name", "<|CHATBOT_TOKEN|>")),
    _Rule(MISTRAL, (MARKER,)),
    _Rule(MISTRAL, ("AVAILABLE_TOOLS",), token=MARKER),
    _Rule(OLMO, ("<function_calls>",)),
    _Rule(QWEN_XML, (FUNCTION, PARAMETER)),
    _Rule(PHI4_MINI, ("<|tool_call|>", "<|/tool_call|>")),
    _Rule(PHI4_MINI, ("<|tool|>",), token="<|/tool_call|>"),
    _Rule(GRANITE, ("<|tool_call|>",)),
    _Rule(HUNYUAN, ("<tool_calls>", "<answer>")),
    _Rule(HERMES, (BEGIN,), lacks=(FUNCTION,)),
    _Rule(HUNYUAN, ("<tool_calls>",)),
    _Rule(GLM, ("[gMASK]", glm.OBSERVATION)),
    _Rule(GLM, ("[gMASK]",), token=glm.OBSERVATION),
    _Rule(PYTHONIC, ("[func_name1(",)),
    _Rule(LLAMA, ("<|start_header_id|>", '"parameters"')),
)
"""Rules in order: a template may also contain the markers of a family whose rule comes later."""


def detect_tool_family(option: str, template: str, tokenizer: Tokenizer) -> ToolFamily | None:
    """Return the tool family of a model; None if the family is unknown or `option` is "none".

    `option` names the family; "auto" detects it from the chat template and the tokenizer.
    """
    if option != "auto":
        return FAMILIES.get(option)
    return next((rule.family for rule in _RULES if rule.matches(template, tokenizer)), None)
