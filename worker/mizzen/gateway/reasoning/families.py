"""The families of models by how they mark their reasoning, and which one a model belongs to."""

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
    """How the models of a family mark reasoning, which comes before the rest of an answer."""

    name: str
    begin: str
    end: str
    always_open: bool = False
    """Whether answers begin with reasoning even where neither prompt nor answer opens it."""

    def opened(self, prompt_end: str) -> bool:
        """Tell whether an answer to a prompt that ends so begins within the reasoning."""
        last = prompt_end.rstrip()
        if last.endswith(self.begin):
            return True
        return self.always_open and not last.endswith(self.end)

    def closed(self, prompt_end: str) -> bool:
        """Tell whether the prompt itself has ended the reasoning, so that there is none."""
        return prompt_end.rstrip().endswith(self.end)

    def parser(self, prompt_end: str) -> ReasoningParser | None:
        """Return a parser for an answer to a prompt; None when the prompt has ended the reasoning."""
        if self.closed(prompt_end):
            return None
        return ReasoningParser(self.begin, self.end, self.opened(prompt_end))

    def before(self, rest: Format, prompt_end: str, tokenizer: Tokenizer) -> Format:
        """Return the format of an answer that may reason before `rest`."""
        if self.closed(prompt_end):
            return rest
        end = structural_tags.mark(tokenizer, self.end)
        free = structural_tags.any_text(*([end] if isinstance(end, str) else ()))
        if self.opened(prompt_end):
            thought = structural_tags.tag("", free, end)
        else:
            thought = structural_tags.optional(
                structural_tags.tag(structural_tags.mark(tokenizer, self.begin), free, end)
            )
        return structural_tags.sequence(thought, {"type": "regex", "pattern": r"\n{0,2}"}, rest)


QWEN = ReasoningFamily("qwen3", "<think>", "</think>")
DEEPSEEK = ReasoningFamily("deepseek-r1", "<think>", "</think>", always_open=True)
MAGISTRAL = ReasoningFamily("magistral", "[THINK]", "[/THINK]")

FAMILIES = {family.name: family for family in (QWEN, DEEPSEEK, MAGISTRAL)}
NAMES = ("auto", "none", *FAMILIES)
"""Values of the option `reasoning_parser`."""


def reasoning_family(option: str, template: str, tokenizer: Tokenizer) -> ReasoningFamily | None:
    """Return a model's family: the one that the option names, or what its template and tokens show."""
    if option != "auto":
        return FAMILIES.get(option)
    for family in (QWEN, MAGISTRAL):
        if family.end in template or tokenizer.token_id(family.end) is not None:
            return family
    return None


def as_format(grammar: Grammar) -> Format:
    """Return a grammar as a part of a structural tag.

    Raises:
        ValueError: a structural tag is no JSON, or of the older form, which cannot be a part of another.
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
        given = msgspec.json.decode(grammar.text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the structural tag is not valid JSON: {error}") from None
    if not isinstance(given, dict) or "format" not in given:
        raise ValueError("a structural tag for a model that reasons must have a `format`")
    return given["format"]
