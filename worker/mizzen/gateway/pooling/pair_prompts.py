# SPDX-License-Identifier: Apache-2.0
"""Prompts with which a model judges whether a document answers a query.

They have the form of the model's own chat template if that knows the roles `query` and `document`, else the
form of Qwen3-Reranker or, for other cross-encoders, that of the tokenizer. A prompt that is too long is cut
at the end of its document, never in its query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.requests.generation_request import EncodedPrompt
from mizzen.gateway.requests.text_batch import truncated_length
from mizzen.gateway.text.model import TextModel
from mizzen.gateway.text.template import ChatTemplate, TemplateError
from mizzen.gateway.text.tokenizer import Tokenizer

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")
THINKING = "<think>"
LABELS = ("yes", "no")
"""Answers whose probabilities are compared."""
ROLES = ("query", "document")


class PairForm(Protocol):
    """Form of the prompt for a query and a document."""

    def encode(self, query: str, document: str, instruction: str | None) -> EncodedPrompt:
        """Return the tokens of the prompt."""
        ...


@dataclass(frozen=True, slots=True)
class QwenPairForm:
    """Form of Qwen3-Reranker's prompts, as in the recipe of its model card.

    The frame and the pair are tokenized separately, so that no token spans their boundary.
    """

    tokenizer: Tokenizer

    def encode(self, query: str, document: str, instruction: str | None) -> EncodedPrompt:
        """Return the tokens of the prompt."""
        pair = f"<Instruct>: {instruction or DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        prefix, ids, suffix = self.tokenizer.encode_batch([PREFIX, pair, SUFFIX], add_special_tokens=False)
        return EncodedPrompt(np.array(prefix + ids + suffix, np.int32))


@dataclass(frozen=True, slots=True)
class TemplatePairForm:
    """Form given by a chat template that knows the roles `query` and `document`."""

    tokenizer: Tokenizer
    template: ChatTemplate

    def encode(self, query: str, document: str, instruction: str | None) -> EncodedPrompt:
        """Return the tokens of the prompt.

        Raises:
            ApiError: 400 if the template rejects the messages.
        """
        messages = [{"role": "system", "content": instruction}] if instruction else []
        messages += [{"role": "query", "content": query}, {"role": "document", "content": document}]
        try:
            prompt = self.template.render(messages)
        except TemplateError as error:
            raise invalid(str(error), "query", "chat_template") from error
        return EncodedPrompt(np.array(self.tokenizer.encode(prompt, add_special_tokens=False), np.int32))


@dataclass(frozen=True, slots=True)
class JoinedPairForm:
    """Form of a cross-encoder's prompts: the tokenizer joins the two texts with its special tokens."""

    tokenizer: Tokenizer

    def encode(self, query: str, document: str, instruction: str | None) -> EncodedPrompt:
        """Return the tokens of the prompt; an instruction precedes the query."""
        first = f"{instruction} {query}" if instruction else query
        ids, second_start = self.tokenizer.encode_pair(first, document)
        return EncodedPrompt(np.array(ids, np.int32), second_start)


def has_pair_template(text: TextModel) -> bool:
    """Return whether a model's chat template knows the roles of pairs."""
    source = text.template_source
    return all(f"'{role}'" in source or f'"{role}"' in source for role in ROLES)


def find_pair_form(text: TextModel, *, classifies: bool) -> PairForm | None:
    """Return the form of a model's prompts for pairs; None if the model has no such form.

    Args:
        text: the text model.
        classifies: whether the model has a classification head. Only the head of a model with Qwen3's tokens
            takes prompts of Qwen3-Reranker.
    """
    if text.template is not None and has_pair_template(text):
        return TemplatePairForm(text.tokenizer, text.template)
    chats = all(text.tokenizer.special_token_id(token) is not None for token in CHAT_TOKENS)
    if chats and not (classifies and text.tokenizer.token_id(THINKING) is None):
        return QwenPairForm(text.tokenizer)
    return JoinedPairForm(text.tokenizer) if classifies else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPrompt:
    """Prompt for one query and one document, with the labels `yes` and `no`."""

    query: str
    document: str
    instruction: str | None = None
    classifies: bool = False
    """Whether the model has a classification head, so that its prompt needs no labels."""
    max_document_tokens: int | None = None
    """Number of tokens to which the document is cut."""
    truncate: int | None = None
    """Number of tokens to which the prompt is cut, at the end of its document; -1 for the context length."""

    async def encode(self, text: TextModel, context: int) -> EncodedPrompt:
        """Return the prompt's tokens.

        Raises:
            ApiError: 400 if the model has no form for pairs, or the query alone is too long.
        """
        form = find_pair_form(text, classifies=self.classifies)
        if form is None:
            raise not_a_reranker()
        length = len(self.query) + len(self.document) + len(self.instruction or "")
        return await text.run(length, lambda: self._encode(form, text.tokenizer, context))

    def label_ids(self, text: TextModel) -> tuple[int, ...]:
        """Return the ids of the tokens `yes` and `no`; none for a model with a classification head.

        Raises:
            ApiError: 400 if the tokenizer lacks one of them.
        """
        if self.classifies:
            return ()
        ids = [text.tokenizer.token_id(label) for label in LABELS]
        if any(number is None for number in ids):
            raise not_a_reranker()
        return tuple(number for number in ids if number is not None)

    def _encode(self, form: PairForm, tokenizer: Tokenizer, context: int) -> EncodedPrompt:
        document, limit = self.document, truncated_length(self.truncate, context)
        if self.max_document_tokens is not None:
            document = tokenizer.cut_text(document, self.max_document_tokens)
        return fit_document(
            lambda part: form.encode(self.query, part, self.instruction), tokenizer, document, limit
        )


def fit_document(
    encode: Callable[[str], EncodedPrompt], tokenizer: Tokenizer, document: str, limit: int
) -> EncodedPrompt:
    """Return the tokens of a prompt, whose document is cut so that it has at most `limit` tokens.

    Args:
        encode: function that returns the prompt's tokens for a document.
        tokenizer: tokenizer of the model.
        document: the document.
        limit: maximum number of tokens; 0 for no limit.

    Raises:
        ApiError: 400 if the prompt is too long even without a document.
    """
    prompt = encode(document)
    if not limit or len(prompt.ids) <= limit:
        return prompt
    room = limit - len(encode("").ids)
    while len(prompt.ids) > limit and room > 0:
        document = tokenizer.cut_text(document, room)
        prompt = encode(document)
        # Tokens at the ends of the document may differ within the prompt.
        room -= max(1, len(prompt.ids) - limit)
    if len(prompt.ids) > limit:
        text = f"query is too long: it leaves no room for a document in {limit} tokens"
        raise invalid(text, "query", "context_length_exceeded")
    return prompt


def not_a_reranker() -> ApiError:
    """Return the 400 error for a model that cannot judge pairs."""
    return invalid(
        "model is neither a reranker nor an embedding model: it has no classification head, and neither a "
        "chat template with the roles query and document nor Qwen3-Reranker's tokens",
        "model",
        "unsupported_model",
    )
