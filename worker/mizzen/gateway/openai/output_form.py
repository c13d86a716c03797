# SPDX-License-Identifier: Apache-2.0
"""Determine how the output of a chat request is constrained and parsed: tool calls and reasoning.

The chat parser creates a `ChatOutputForm`. Its methods detect the model's tool and reasoning families, once
the model that answers the request is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mizzen.core.request import Int32
from mizzen.core.sampling_params import Grammar
from mizzen.gateway.errors import invalid
from mizzen.gateway.harmony.conversation import EFFORTS, arrange_messages
from mizzen.gateway.harmony.output_form import HarmonyForm, find_harmony_form
from mizzen.gateway.harmony.response_format import HEADING, add_format, describe_format
from mizzen.gateway.openai.format_schemas import JsonSchema
from mizzen.gateway.openai.schemas import ChatRequest
from mizzen.gateway.reasoning.families import ReasoningFamily, detect_reasoning_family, grammar_format
from mizzen.gateway.requests.output import OutputForm, OutputParser, PlainOutput
from mizzen.gateway.text.model import TextModel
from mizzen.gateway.tools import structural_tags
from mizzen.gateway.tools.families import BARE, ToolFamily, detect_tool_family
from mizzen.gateway.tools.parsed_output import ParsedOutput
from mizzen.gateway.tools.structural_tags import Format
from mizzen.gateway.tools.tool_choice import OfferedTools, parse_tools

PROMPT_TAIL_TOKENS = 16
"""Number of tokens at the end of a prompt that are searched for a reasoning tag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyOptions:
    """Names of the model's tool and reasoning families.

    "auto" detects the family from the chat template; "none" leaves tool calls or reasoning unparsed.
    """

    tools: str = "auto"
    reasoning: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOutputForm:
    """`OutputForm` of a chat request: the offered tools, and reasoning if the model supports it."""

    tools: OfferedTools | None
    options: FamilyOptions
    effort: str | None = None
    """The request's `reasoning_effort`; None if `chat_template_kwargs` sets this variable itself."""
    schema: JsonSchema | None = None
    """Schema of the answer, which models with harmony format are shown; None for any answer."""

    def template_arguments(self, text: TextModel) -> dict[str, Any]:
        """Return the chat template variable `tools` if the request offers tools, and other variables.

        Models with harmony format know three efforts, so the variable `reasoning_effort` is one of these.

        Raises:
            ApiError: 400 if the request offers tools without forcing a call, and the model's tool call
                format is unknown.
        """
        harmony = self._harmony(text)
        variables: dict[str, Any] = {}
        if harmony is not None and self.effort in EFFORTS:
            variables["reasoning_effort"] = EFFORTS[self.effort]
        if self.tools is None:
            return variables
        known = self._family(text) is not None if harmony is None else harmony.parses_calls
        if not known and not self.tools.forced:
            raise invalid(
                "tools: the model's tool call format is unknown, so it cannot choose whether to call a tool;"
                ' set tool_choice to "required" or a named tool (or the gateway\'s option --tool-parser)',
                "tools",
                "unsupported_parameter",
            )
        return {**variables, "tools": self.tools.template_tools()}

    def messages(self, text: TextModel, messages: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        """Return the messages in the form that the family's chat template accepts."""
        if self._harmony(text) is not None:
            return arrange_messages(messages)
        family = self._family(text)
        if family is None or family.call_id is str:
            return messages
        return tuple(convert_call_ids(message, family) for message in add_call_ids(messages))

    def prompt_section(self, text: TextModel) -> str:
        """Return the description of the answer's schema that `finish_prompt` adds; empty for none."""
        schema = self.schema
        if schema is None or schema.schema is None or self._harmony(text) is None:
            return ""
        if HEADING in text.template_source:
            return ""
        return describe_format(schema.name, schema.description, schema.schema)

    def finish_prompt(self, prompt: str, section: str) -> str:
        """Return the text of a prompt with a section of `prompt_section`."""
        return add_format(prompt, section) if section else prompt

    def grammar(self, text: TextModel, prompt: Int32, requested: Grammar | None) -> Grammar | None:
        """Return the grammar that constrains the answer to a prompt (int32 [n]); None for no constraint.

        `requested` is the grammar that the request itself sets. It constrains text, not calls, so a forced
        call ignores it.

        Raises:
            ApiError: 400 if a schema is nested too deeply.
            ValueError: `requested` cannot be combined with reasoning or tool calls.
        """
        harmony = self._harmony(text)
        if harmony is not None:
            return harmony.grammar(prompt, self.tools, requested)
        calls = self._calls_format(text, requested)
        if calls is None and requested is None:
            return None
        reasoning = self._reasoning(text)
        end = "" if reasoning is None else prompt_tail(text, prompt)
        if reasoning is None or (reasoning.ends_reasoning(end) and reasoning.answer is None):
            return requested if calls is None else structural_tags.structural_tag_grammar(calls)
        only_calls = calls is not None and self.tools is not None and self.tools.forced
        if calls is None and requested is not None:
            calls = grammar_format(requested)
        return structural_tags.structural_tag_grammar(
            reasoning.format_with_reasoning(calls or {}, end, text.tokenizer, only_calls=only_calls)
        )

    def find_schema_field(self, keyword: str, path: str) -> str | None:
        """Return the path, in the request body, of a schema keyword that an engine does not enforce.

        `path` leads from the root of a tool's schema to the subschema with the keyword. Return None if no
        strict tool has the keyword there.
        """
        return None if self.tools is None else self.tools.find_schema_field(keyword, path)

    def parser(self, text: TextModel, prompt: Int32, stop: tuple[str, ...]) -> OutputParser:
        """Return a parser that splits reasoning and tool calls off the text of one choice.

        `stop` holds the stop strings. If the end of the prompt (int32 [n]) opens reasoning, the parser
        begins within reasoning.
        """
        harmony = self._harmony(text)
        if harmony is not None:
            return harmony.parser(prompt, self.tools, stop)
        reasoning = self._reasoning(text)
        if reasoning is None and self.tools is None:
            return PlainOutput(stop)
        shown = () if reasoning is None else reasoning.tags
        split = None if reasoning is None else reasoning.parser(prompt_tail(text, prompt))
        if self.tools is None:
            return ParsedOutput(split, None, shown, stop)
        family = self._family(text) or BARE
        shown += family.shown_tokens
        if self.tools.forced:
            return ParsedOutput(split, family.parser(self.tools.schemas), shown, only_calls=True)
        return ParsedOutput(split, family.parser(self.tools.schemas, stop), shown)

    def _calls_format(self, text: TextModel, requested: Grammar | None) -> Format | None:
        """Return the format of output that may contain tool calls; None if tool calls are not constrained."""
        tools = self.tools
        if tools is None:
            return None
        family = self._family(text) or BARE
        calls = tools.calls
        if tools.forced:
            return family.forced(calls, tools.allow_parallel, text.tokenizer)
        if requested is not None:
            return structural_tags.either(
                family.forced(calls, tools.allow_parallel, text.tokenizer), grammar_format(requested)
            )
        if tools.strict or tools.restricted:
            return family.free(calls, tools.allow_parallel, text.tokenizer)
        return None

    def _harmony(self, text: TextModel) -> HarmonyForm | None:
        options = self.options
        return find_harmony_form(options.tools, options.reasoning, text.template_source, text.tokenizer)

    def _family(self, text: TextModel) -> ToolFamily | None:
        return detect_tool_family(self.options.tools, text.template_source, text.tokenizer)

    def _reasoning(self, text: TextModel) -> ReasoningFamily | None:
        return detect_reasoning_family(self.options.reasoning, text.template_source, text.tokenizer)


def chat_output_form(request: ChatRequest, options: FamilyOptions) -> OutputForm:
    """Return the `OutputForm` of a chat request; `options` names the model's families.

    Raises:
        ApiError: 400 if the tools or the tool choice are invalid; the error names the field.
    """
    tools = parse_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
    has_variable = "reasoning_effort" in (request.chat_template_kwargs or {})
    effort = None if has_variable else request.reasoning_effort
    schema = None if request.response_format is None else request.response_format.json_schema
    return ChatOutputForm(tools=tools, options=options, effort=effort, schema=schema)


def prompt_tail(text: TextModel, prompt: Int32) -> str:
    """Return the text of a prompt's last `PROMPT_TAIL_TOKENS` tokens, including special tokens."""
    tail = np.asarray(prompt)[-PROMPT_TAIL_TOKENS:].tolist()
    return text.tokenizer.decode(tail, skip_special_tokens=False)


def add_call_ids(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages, with ids for calls and results that have none; results follow calls in order."""
    unanswered: list[str] = []
    for index, message in enumerate(messages):
        calls = [
            {"id": f"{index} {number}", **call} for number, call in enumerate(message.get("tool_calls", ()))
        ]
        if calls:
            unanswered = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool" and unanswered:
            message = {"tool_call_id": unanswered[0], **message}
            unanswered = [call_id for call_id in unanswered if call_id != message["tool_call_id"]]
        yield message


def convert_call_ids(message: dict[str, Any], family: ToolFamily) -> dict[str, Any]:
    """Return a message whose call ids have the form that the family's template accepts."""
    converted = dict(message)
    if "tool_call_id" in converted:
        converted["tool_call_id"] = family.call_id(converted["tool_call_id"])
    if "tool_calls" in converted:
        converted["tool_calls"] = [
            {**call, "id": family.call_id(call["id"])} if "id" in call else call
            for call in converted["tool_calls"]
        ]
    return converted
