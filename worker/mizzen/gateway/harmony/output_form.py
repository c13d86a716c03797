# SPDX-License-Identifier: Apache-2.0
"""Detection of the harmony format, and treatment of a request's tools and reasoning for models with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mizzen.core.request import Int32
from mizzen.core.sampling_params import Grammar
from mizzen.gateway.harmony.formats import HarmonyFormats
from mizzen.gateway.harmony.markers import CHANNEL, CLOSING, MARKERS, MARKS, MESSAGE, START, find_marks
from mizzen.gateway.harmony.output_parser import HarmonyParser
from mizzen.gateway.reasoning.families import HARMONY_NAMES as REASONING_NAMES
from mizzen.gateway.reasoning.families import grammar_format
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.gateway.tools import structural_tags
from mizzen.gateway.tools.families import HARMONY_NAMES as TOOL_NAMES
from mizzen.gateway.tools.tool_choice import OfferedTools

MAX_HEADER_TOKENS = 64
"""Maximum number of tokens between the last `<|start|>` of a prompt and the `<|message|>` after it."""


@dataclass(frozen=True, slots=True)
class HarmonyForm:
    """Treatment of the answers of a model whose format is harmony."""

    tokenizer: Tokenizer
    marks: dict[int, str]
    """Marks of the format's tokens by their ids."""
    parses_calls: bool
    """False if the gateway's options turn calls off, except for forced calls."""
    keeps_reasoning: bool
    """False if the gateway's options make reasoning part of the content."""

    def parser(self, prompt: Int32, tools: OfferedTools | None, stop: tuple[str, ...]) -> HarmonyParser:
        """Return a parser for one choice of the answer to a prompt (int32 [n])."""
        names = () if tools is None or not (self.parses_calls or tools.forced) else tools.schemas
        parser = HarmonyParser(self.marks, names, stop, keep_reasoning=self.keeps_reasoning)
        parser.skip_prompt(self._open_message(prompt))
        return parser

    def grammar(self, prompt: Int32, tools: OfferedTools | None, requested: Grammar | None) -> Grammar | None:
        """Return the grammar that constrains the answer to a prompt (int32 [n]); None for no constraint.

        `requested` is the grammar that the request itself sets. It constrains the channel `final`, and a
        forced call ignores it.

        Raises:
            ApiError: 400 if a schema is nested too deeply.
            ValueError: the grammar or the prompt cannot be part of the format.
        """
        constrains_calls = tools is not None and (tools.forced or tools.strict or tools.restricted)
        if requested is None and not constrains_calls:
            return None
        formats = HarmonyFormats(self.tokenizer)
        content = structural_tags.any_text() if requested is None else grammar_format(requested)
        start = HarmonyParser(self.marks)
        start.skip_prompt(self._open_message(prompt))
        if not start.counts_tokens:  # the prompt opens the answer itself
            return None if requested is None else structural_tags.structural_tag_grammar(content)
        last = formats.final(content)
        if tools is not None:
            calls = formats.calls(tools.calls)
            last = calls if tools.forced else structural_tags.either(calls, last)
        preamble = requested is None and tools is not None and not tools.forced
        return structural_tags.structural_tag_grammar(formats.answer(last, start, preamble=preamble))

    def _open_message(self, prompt: Int32) -> str:
        """Return the header of the message that a prompt leaves open, with marks; empty if it leaves none."""
        ids = np.asarray(prompt)
        closing = [token for token, mark in self.marks.items() if MARKERS[mark] in CLOSING]
        starts = np.flatnonzero(ids == self.tokenizer.token_id(START))
        if not len(starts) or np.isin(ids[starts[-1] :], closing).any():
            return ""
        header = ids[starts[-1] : starts[-1] + MAX_HEADER_TOKENS].tolist()
        text = self.tokenizer.detokenizer(marks=self.marks).add(header)
        before, message, _ = text.partition(MARKS[MESSAGE])
        return before + message


def find_harmony_form(tools: str, reasoning: str, template: str, tokenizer: Tokenizer) -> HarmonyForm | None:
    """Return the treatment of a model's answers if its format is harmony, else None.

    `tools` and `reasoning` are the options `tool_parser` and `reasoning_parser`. "auto" detects the format
    from the chat template and the vocabulary; another family's name turns it off.
    """
    known = tools in ("auto", "none", *TOOL_NAMES) and reasoning in ("auto", "none", *REASONING_NAMES)
    if not known or tools == reasoning == "none":
        return None
    named = tools in TOOL_NAMES or reasoning in REASONING_NAMES
    if not named and not (CHANNEL in template and MESSAGE in template):
        return None
    marks = find_marks(tokenizer)
    if marks is None:
        return None
    return HarmonyForm(tokenizer, marks, parses_calls=tools != "none", keeps_reasoning=reasoning != "none")
