# SPDX-License-Identifier: Apache-2.0
"""Model families by their reasoning tags and answer tags, and detection of a model's family."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from mizzen.core.sampling_params import Grammar, GrammarKind
from mizzen.gateway.reasoning.answer_tags import AnswerTags
from mizzen.gateway.reasoning.parser import ReasoningParser
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.gateway.tools import structural_tags
from mizzen.gateway.tools.structural_tags import Format


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """Reasoning tags of a model family. Reasoning precedes the rest of the output."""

    name: str
    begins: tuple[str, ...]
    """Opening tags; a grammar uses the first."""
    ends: tuple[str, ...]
    """Closing tags; a grammar uses the first."""
    always_open: bool = False
    """True if output starts with reasoning even if neither prompt nor output contains the opening tag."""
    answer: AnswerTags | None = None
    """Tags around the content, which may also be missing."""
    opened_by: tuple[str, ...] = ()
    """Further ends of prompts after which output starts within reasoning."""

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags, which detokenization must leave in the text even if they are special tokens."""
        answer = () if self.answer is None else (self.answer.begin, self.answer.end)
        return (*self.begins, *self.ends, *answer)

    def starts_inside(self, prompt_end: str) -> bool:
        """Return whether output starts within reasoning; `prompt_end` is the text at the prompt's end."""
        text = prompt_end.rstrip()
        if text.endswith((*self.begins, *self.opened_by)):
            return True
        return self.always_open and not text.endswith(self.ends)

    def ends_reasoning(self, prompt_end: str) -> bool:
        """Return whether the prompt itself closes the reasoning, so that the output contains none."""
        return prompt_end.rstrip().endswith(self.ends)

    def parser(self, prompt_end: str) -> ReasoningParser | None:
        """Return a parser that splits off reasoning; None if the output consists only of content."""
        closed = self.ends_reasoning(prompt_end)
        if closed and self.answer is None:
            return None
        inside = self.starts_inside(prompt_end)
        return ReasoningParser(self.begins, self.ends, inside, answer=self.answer, closed=closed)

    def format_with_reasoning(
        self, rest: Format, prompt_end: str, tokenizer: Tokenizer, *, only_calls: bool = False
    ) -> Format:
        """Return the format of output that may begin with reasoning, followed by output of format `rest`.

        Line breaks may precede `rest` only after reasoning: the parser of reasoning drops them there, but
        without reasoning they would be part of the content. With `only_calls`, `rest` consists of tool calls.
        """
        if self.answer is not None and (self.answer.around_calls or not only_calls):
            rest = wrap_answer(rest, self.answer, tokenizer)
        if self.ends_reasoning(prompt_end):
            return rest
        end = structural_tags.tag_marker(tokenizer, self.ends[0])
        excluded = [self.ends[0]] if isinstance(end, str) else []
        free = structural_tags.any_text(*excluded, *self.ends[1:])
        inside = self.starts_inside(prompt_end)
        begin = "" if inside else structural_tags.tag_marker(tokenizer, self.begins[0])
        breaks = {"type": "regex", "pattern": r"\n{0,2}"}
        reasoning = structural_tags.sequence(structural_tags.tag(begin, free, end), breaks)
        return structural_tags.sequence(reasoning if inside else structural_tags.optional(reasoning), rest)


def wrap_answer(content: Format, tags: AnswerTags, tokenizer: Tokenizer) -> Format:
    """Return the format of content that may be between tags; a line break may separate it from each tag."""
    line_break = {"type": "regex", "pattern": r"\n?"}
    begin = structural_tags.sequence(structural_tags.marker_format(tokenizer, tags.begin), line_break)
    end = structural_tags.sequence(line_break, structural_tags.marker_format(tokenizer, tags.end))
    return structural_tags.sequence(structural_tags.optional(begin), content, structural_tags.optional(end))


THINK, THINK_END = ("<think>",), ("</think>",)
QWEN = ReasoningFamily("qwen3", THINK, THINK_END)
DEEPSEEK = ReasoningFamily("deepseek-r1", THINK, THINK_END, always_open=True)
MAGISTRAL = ReasoningFamily("magistral", ("[THINK]",), ("[/THINK]",))
GRANITE = ReasoningFamily(
    "granite",
    THINK,
    THINK_END,
    answer=AnswerTags("<response>", "</response>", before=("<|tool_call|>", "<tool_call>")),
)
GRANITE_32 = ReasoningFamily(
    "granite32",
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
HUNYUAN = ReasoningFamily(
    "hunyuan",
    THINK,
    THINK_END,
    answer=AnswerTags("<answer>", "</answer>", before=("<tool_calls>", "<tool_call>"), around_calls=True),
)
COHERE = ReasoningFamily(
    "cohere",
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>",),
    answer=AnswerTags("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
)
SEED = ReasoningFamily(
    "seed-oss",
    ("<seed:think>",),
    ("</seed:think>",),
    opened_by=("<seed:think><seed:cot_budget_reflect>",),
)

FAMILIES = {
    family.name: family for family in (QWEN, DEEPSEEK, MAGISTRAL, GRANITE, GRANITE_32, HUNYUAN, COHERE, SEED)
}
HARMONY_NAMES = ("gpt-oss", "openai_gptoss")
"""Names of gpt-oss's format, whose parser finds tool calls, too (`mizzen.gateway.harmony`)."""
NAMES = ("auto", "none", *FAMILIES, *HARMONY_NAMES)
"""Values of the option `reasoning_parser`."""


def detect_reasoning_family(option: str, template: str, tokenizer: Tokenizer) -> ReasoningFamily | None:
    """Return the reasoning family of a model; None if it is unknown, or the option is "none".

    `option` names the family. "auto" selects the family whose closing tag occurs in the chat template or is
    a token of the tokenizer. Families with tags around the answer are detected by these tags in the template.
    """
    if option != "auto":
        return FAMILIES.get(option)
    for family in (SEED, COHERE, QWEN, MAGISTRAL):
        if family.ends[0] in template or tokenizer.token_id(family.ends[0]) is not None:
            wrapped = (other for other in (HUNYUAN, GRANITE) if other.answer and other.answer.end in template)
            return next(wrapped, family) if family is QWEN else family
    prose = (GRANITE_32.begins[0], GRANITE_32.ends[0])
    return GRANITE_32 if all(phrase in template for phrase in prose) else None


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
