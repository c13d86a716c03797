"""Which output form a chat request asks for: tools and reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mizzen.core.request import Int32
from mizzen.core.sampling_params import Grammar
from mizzen.gateway.errors import invalid
from mizzen.gateway.openai.schemas import ChatRequest
from mizzen.gateway.reasoning.families import ReasoningFamily, as_format, reasoning_family
from mizzen.gateway.requests.output import OutputForm, OutputParser, PlainOutput
from mizzen.gateway.text.model import TextModel
from mizzen.gateway.tools import structural_tags
from mizzen.gateway.tools.families import BARE, ToolFamily, tool_family
from mizzen.gateway.tools.parsed_output import FormedOutput
from mizzen.gateway.tools.structural_tags import Format
from mizzen.gateway.tools.tool_choice import Tools, chosen

PROMPT_END = 16
"""Tokens of a prompt's end in which a tag of reasoning is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyOptions:
    """Names of families in place of what the model's template shows; "auto" looks there, "none" is none."""

    tools: str = "auto"
    reasoning: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatForm:
    """An `OutputForm`: what a conversation's tools mean, and that models may reason."""

    tools: Tools | None
    options: FamilyOptions

    def template_arguments(self, text: TextModel) -> dict[str, Any]:
        """See `OutputForm`."""
        if self.tools is None:
            return {}
        if self._family(text) is None and not self.tools.forced:
            raise invalid(
                "tools: it is not known how this model calls tools, so it cannot choose to; tool_choice"
                ' "required" or a named tool works (or the gateway\'s option --tool-parser)',
                "tools",
                "unsupported_parameter",
            )
        return {"tools": self.tools.for_template()}

    def messages(self, text: TextModel, given: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        """See `OutputForm`: ids of calls become such as the family's template takes."""
        family = self._family(text)
        if family is None or family.call_id is str:
            return given
        return tuple(with_call_ids(message, family) for message in given)

    def grammar(self, text: TextModel, prompt: Int32, given: Grammar | None) -> Grammar | None:
        """See `OutputForm`. `given` is for answers in text, and has no place where a call is forced."""
        calls = self._calls(text, given)
        if calls is None and given is None:
            return None
        reasoning = self._reasoning(text)
        end = "" if reasoning is None else prompt_end(text, prompt)
        if reasoning is None or reasoning.closed(end):
            return given if calls is None else structural_tags.grammar(calls)
        if calls is None and given is not None:
            calls = as_format(given)
        return structural_tags.grammar(reasoning.before(calls or {}, end, text.tokenizer))

    def find_schema_field(self, keyword: str, path: str) -> str | None:
        """See `OutputForm`."""
        return None if self.tools is None else self.tools.find_schema_field(keyword, path)

    def parser(self, text: TextModel, prompt: Int32, stop: tuple[str, ...]) -> OutputParser:
        """See `OutputForm`."""
        reasoning = self._reasoning(text)
        if reasoning is None and self.tools is None:
            return PlainOutput(stop)
        shown = () if reasoning is None else (reasoning.begin, reasoning.end)
        split = None if reasoning is None else reasoning.parser(prompt_end(text, prompt))
        if self.tools is None:
            return FormedOutput(split, None, shown, stop)
        family = self._family(text) or BARE
        shown += family.shown_tokens
        if self.tools.forced:
            return FormedOutput(split, family.parser(self.tools.schemas), shown, only_calls=True)
        return FormedOutput(split, family.parser(self.tools.schemas, stop), shown)

    def _calls(self, text: TextModel, given: Grammar | None) -> Format | None:
        """Return the format of an answer with calls; None where nothing about calls is constrained."""
        tools = self.tools
        if tools is None:
            return None
        family = self._family(text) or BARE
        calls = tools.calls
        if tools.forced:
            return family.forced(calls, tools.many, text.tokenizer)
        if given is not None:
            return structural_tags.either(family.forced(calls, tools.many, text.tokenizer), as_format(given))
        if tools.strict or tools.limited:
            return family.free(calls, tools.many, text.tokenizer)
        return None

    def _family(self, text: TextModel) -> ToolFamily | None:
        return tool_family(self.options.tools, template_source(text), text.tokenizer)

    def _reasoning(self, text: TextModel) -> ReasoningFamily | None:
        return reasoning_family(self.options.reasoning, template_source(text), text.tokenizer)


def output_form(request: ChatRequest, options: FamilyOptions) -> OutputForm:
    """Return what tools and reasoning options of a request mean.

    Raises:
        ApiError: 400, which names the field.
    """
    tools = chosen(request.tools, request.tool_choice, request.parallel_tool_calls)
    return ChatForm(tools=tools, options=options)


def template_source(text: TextModel) -> str:
    """Return the text of a model's chat templates."""
    return "" if text.template is None else text.template.source


def prompt_end(text: TextModel, prompt: Int32) -> str:
    """Return the text of a prompt's last tokens, special tokens included."""
    last = np.asarray(prompt)[-PROMPT_END:].tolist()
    return text.tokenizer.decode(last, skip_special_tokens=False)


def with_call_ids(message: dict[str, Any], family: ToolFamily) -> dict[str, Any]:
    """Return a message with the ids of its calls as a family's template takes them."""
    found = dict(message)
    if "tool_call_id" in found:
        found["tool_call_id"] = family.call_id(found["tool_call_id"])
    if "tool_calls" in found:
        found["tool_calls"] = [
            {**call, "id": family.call_id(call["id"])} if "id" in call else call
            for call in found["tool_calls"]
        ]
    return found
