"""Model families by their reasoning tags, and detection of a model's family."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from mizzen.core.sampling_params import Grammar, GrammarKind
from mizzen.gateway.reasoning.parser import ReasoningParser
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.gateway.tools import structural_tags
from mizzen.gateway.tools.structural_tags import Format


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """Reasoning tags of a model family. Reasoning precedes the rest of the output."""

    name: str
    begin: str
    end: str
    always_open: bool = False
    """True if output starts with reasoning even if neither prompt nor output contains the opening tag."""

    def starts_inside(self, prompt_end: str) -> bool:
        """Return whether output starts within reasoning; `prompt_end` is the text at the prompt's end."""
        text = prompt_end.rstrip()
        if text.endswith(self.begin):
            return True
        return self.always_open and not text.endswith(self.end)

    def ends_reasoning(self, prompt_end: str) -> bool:
        """Return whether the prompt itself closes the reasoning, so that the output contains none."""
        return prompt_end.rstrip().endswith(self.end)

    def parser(self, prompt_end: str) -> ReasoningParser | None:
        """Return a parser that splits off reasoning; None if the prompt itself closes the reasoning."""
        if self.ends_reasoning(prompt_end):
            return None
        return ReasoningParser(self.begin, self.end, self.starts_inside(prompt_end))

    def format_with_reasoning(self, rest: Format, prompt_end: str, tokenizer: Tokenizer) -> Format:
        """Return the format of output that may begin with reasoning, followed by output of format `rest`.

        Line breaks may precede `rest` only after reasoning: the parser of reasoning drops them there, but
        without reasoning they would be part of the content.
        """
        if self.ends_reasoning(prompt_end):
            return rest
        end = structural_tags.tag_marker(tokenizer, self.end)
        free = structural_tags.any_text(*([end] if isinstance(end, str) else ()))
        inside = self.starts_inside(prompt_end)
        begin = "" if inside else structural_tags.tag_marker(tokenizer, self.begin)
        breaks = {"type": "regex", "pattern": r"\n{0,2}"}
        reasoning = structural_tags.sequence(structural_tags.tag(begin, free, end), breaks)
        return structural_tags.sequence(reasoning if inside else structural_tags.optional(reasoning), rest)


QWEN = ReasoningFamily("qwen3", "<think>", "</think>")
DEEPSEEK = ReasoningFamily("deepseek-r1", "<think>", "</think>", always_open=True)
MAGISTRAL = ReasoningFamily("magistral", "[THINK]", "[/THINK]")

FAMILIES = {family.name: family for family in (QWEN, DEEPSEEK, MAGISTRAL)}
NAMES = ("auto", "none", *FAMILIES)
"""Values of the option `reasoning_parser`."""


def detect_reasoning_family(option: str, template: str, tokenizer: Tokenizer) -> ReasoningFamily | None:
    """Return the reasoning family of a model; None if it is unknown, or the option is "none".

    `option` names the family. "auto" selects the family whose closing tag occurs in the chat template or is
    a token of the tokenizer.
    """
    if option != "auto":
        return FAMILIES.get(option)
    for family in (QWEN, MAGISTRAL):
        if family.end in template or tokenizer.token_id(family.end) is not None:
            return family
    return None


def grammar_format(grammar: Grammar) -> Format:
    """Return the format that allows the same output as a grammar.

    Raises:
        ValueError: the grammar is a structural tag that is not JSON, or has xgrammar's older form, which
            cannot be nested.
    """
    kind = grammar.kind
    if kind is GrammarKind.JSON_OBJECT:
        return structural_tags.json_value({"type": "object"})
    if kind is GrammarKind.JSON_SCHEMA:
        return structural_tags.json_value(msgspec.json.decode(grammar.text))
    if kind is GrammarKind.REGEX:
        return {"type": "regex", "pattern": grammar.text}
    if kind is GrammarKind.EBNF:
        return {"type": "grammar", "grammar": grammar.text}
    try:
        tag = msgspec.json.decode(grammar.text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the structural tag is not valid JSON: {error}") from None
    if not isinstance(tag, dict) or "format" not in tag:
        raise ValueError("a structural tag for a reasoning model must have a `format`")
    return tag["format"]
