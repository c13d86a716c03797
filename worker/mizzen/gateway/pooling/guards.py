# SPDX-License-Identifier: Apache-2.0
"""Guard models: language models that answer whether a text is safe, and which category it violates.

Nothing is generated. A prompt that ends before the verdict gives the probabilities of the verdicts, and one
that ends before the first category gives those of the categories. Both begin with the same conversation,
which the engine computes once if it caches prefixes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from mizzen.gateway.errors import invalid
from mizzen.gateway.requests.generation_request import EncodedPrompt
from mizzen.gateway.text.model import TextModel
from mizzen.gateway.text.template import TemplateError

LLAMA_CATEGORY = re.compile(r"S(\d{1,2}): ([A-Z][A-Za-z \-,/&]{2,60}?)\.")
"""A category in Llama Guard's chat template: its number and its name."""
LLAMA_MARK = "<BEGIN UNSAFE CONTENT CATEGORIES>"
QWEN_MARK = "'Safety: Safe', 'Safety: Unsafe', 'Safety: Controversial'"
QWEN_CATEGORIES = (
    "Violent",
    "Non-violent Illegal Acts",
    "Sexual Content or Sexual Acts",
    "PII",
    "Suicide & Self-Harm",
    "Unethical Acts",
    "Politically Sensitive Topics",
    "Copyright Violation",
    "Jailbreak",
)


@dataclass(frozen=True, slots=True)
class GuardForm:
    """Form of a guard model's answers."""

    verdict_prefix: str
    """Beginning of the answer, up to the verdict."""
    verdicts: tuple[str, ...]
    """Verdicts; the first one means that the text is safe, and all others that it is not."""
    category_prefix: str
    """Beginning of the answer for an unsafe text, up to the first category."""
    categories: tuple[str, ...]
    """Texts of the categories in the answer."""
    labels: tuple[str, ...]
    """Names of the categories for the operator's mapping, such as S1."""


def find_guard_form(text: TextModel) -> GuardForm | None:
    """Return the form of a guard model's answers, by its chat template; None if it is not a known guard."""
    source = text.template_source
    if QWEN_MARK in source:
        return GuardForm(
            "Safety: ",
            ("Safe", "Unsafe", "Controversial"),
            "Safety: Unsafe\nCategories: ",
            QWEN_CATEGORIES,
            QWEN_CATEGORIES,
        )
    numbers = dict.fromkeys(match[1] for match in LLAMA_CATEGORY.finditer(source))
    if LLAMA_MARK in source and numbers:
        labels = tuple(f"S{number}" for number in numbers)
        return GuardForm("\n\n", ("safe", "unsafe"), "\n\nunsafe\nS", tuple(numbers), labels)
    return None


@dataclass(frozen=True, slots=True)
class GuardPrompt:
    """Prompt of a guard model for one text, with the labels of its next word."""

    content: str
    form: GuardForm
    categories: bool
    """Whether the prompt ends before the first category of an unsafe text, instead of before the verdict."""
    field: str = "input"

    @property
    def options(self) -> tuple[str, ...]:
        """Words that may come next."""
        return self.form.categories if self.categories else self.form.verdicts

    @property
    def prefix(self) -> str:
        """Beginning of the answer in the prompt."""
        return self.form.category_prefix if self.categories else self.form.verdict_prefix

    async def encode(self, text: TextModel, context: int) -> EncodedPrompt:
        """Return the prompt's tokens: the conversation, and the beginning of the answer.

        Raises:
            ApiError: 400 if the chat template rejects the text.
        """
        messages = ({"role": "user", "content": self.content},)
        try:
            ids = await text.chat_prompt(messages, max_tokens=context)
        except TemplateError as error:
            raise invalid(str(error), self.field, "chat_template") from error
        answer, _ = self._split_answer(text, self.options[0])
        return EncodedPrompt(np.concatenate([ids, np.array(answer, np.int32)]))

    def label_ids(self, text: TextModel) -> tuple[int, ...]:
        """Return the first token of each option.

        Raises:
            ApiError: 400 if two options begin with the same token, so that their probabilities are unknown.
        """
        ids = tuple(self._split_answer(text, option)[1] for option in self.options)
        if len(set(ids)) < len(ids):
            reason = "model is not supported for moderation: words of its answers begin with the same token"
            raise invalid(reason, "model", "unsupported_model")
        return ids

    def _split_answer(self, text: TextModel, option: str) -> tuple[list[int], int]:
        """Return the tokens of the answer before an option, and the option's first token.

        Prefix and option are tokenized together, because a token may contain the space before a word.
        """
        tokens = text.tokenizer.encode(self.prefix + option, add_special_tokens=False)
        other = self.options[1] if option == self.options[0] else self.options[0]
        others = text.tokenizer.encode(self.prefix + other, add_special_tokens=False)
        common = next(
            (i for i, pair in enumerate(zip(tokens, others, strict=False)) if pair[0] != pair[1]),
            min(len(tokens), len(others)) - 1,
        )
        return tokens[:common], tokens[common]
