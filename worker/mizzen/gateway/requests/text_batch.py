# SPDX-License-Identifier: Apache-2.0
"""Texts of one request that are tokenized together, in pieces, and off the event loop if they are long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from mizzen.core.request import Int32
from mizzen.gateway.errors import invalid
from mizzen.gateway.requests.generation_request import EncodedPrompt
from mizzen.gateway.text.model import TextModel, TooManyTokens

PIECE_TEXTS = 128
"""Maximum number of texts that are tokenized in one call, as many as run at a time."""
PIECE_CHARACTERS = 1 << 17
"""Length of a piece in characters above which no further text is added to it."""
WHOLE_CONTEXT = -1
"""Value of `truncate_prompt_tokens` that cuts prompts to the context length."""


def truncated_length(truncate: int | None, context: int) -> int:
    """Return the maximum number of tokens to which prompts are cut; 0 if they are not cut.

    Args:
        truncate: the request's `truncate_prompt_tokens`; None leaves prompts whole.
        context: the context length in tokens; 0 if unknown. A prompt must be shorter than the context.
    """
    if truncate is None:
        return 0
    most = context - 1 if context else 0
    return most if truncate == WHOLE_CONTEXT else min(truncate, most) if most else truncate


@dataclass(slots=True)
class TextBatch:
    """Texts of one request; the first text of a piece that is needed tokenizes the whole piece."""

    texts: Sequence[str]
    add_special_tokens: bool = True
    truncate: int | None = None
    """Number of tokens to which each prompt is cut at its end; -1 for the context length, None for no cut."""
    _pieces: list[range] = field(init=False)
    _tasks: dict[tuple[str, int, int], asyncio.Task[list[Int32 | TooManyTokens]]] = field(
        init=False, default_factory=dict[tuple[str, int, int], asyncio.Task[list[Int32 | TooManyTokens]]]
    )

    def __post_init__(self) -> None:
        """Divide the texts into pieces."""
        self._pieces = list(split_texts(self.texts))

    async def token_ids(self, index: int, text: TextModel, context: int) -> Int32:
        """Return the token ids (int32 [n]) of the text at `index`, for a text model and a context length.

        Raises:
            TooManyTokens: the text must have more tokens than the context.
        """
        number = next(i for i, piece in enumerate(self._pieces) if index < piece.stop)
        piece, key = self._pieces[number], (text.name, number, context)
        if key not in self._tasks:
            texts = [self.texts[i] for i in piece]
            cut = truncated_length(self.truncate, context)
            work = text.batch_prompts(texts, self.add_special_tokens, cut or context, cut=bool(cut))
            self._tasks[key] = asyncio.create_task(work)
        ids = (await asyncio.shield(self._tasks[key]))[index - piece.start]
        if isinstance(ids, TooManyTokens):
            raise ids
        return ids


def split_texts(texts: Sequence[str]) -> list[range]:
    """Return the ranges of indices of the pieces into which texts are divided."""
    pieces, start, characters = list[range](), 0, 0
    for index, text in enumerate(texts):
        characters += len(text)
        if index + 1 - start >= PIECE_TEXTS or characters > PIECE_CHARACTERS or index + 1 == len(texts):
            pieces.append(range(start, index + 1))
            start, characters = index + 1, 0
    return pieces


@dataclass(frozen=True, slots=True)
class BatchedText:
    """Prompt that is one text of a batch."""

    batch: TextBatch
    index: int

    async def encode(self, text: TextModel, context: int) -> EncodedPrompt:
        """Return the tokens of the text; see `TextBatch.token_ids`."""
        return EncodedPrompt(await self.batch.token_ids(self.index, text, context))

    def label_ids(self, text: TextModel) -> tuple[int, ...]:
        """Return no ids: an embedding has no next token."""
        return ()


@dataclass(frozen=True, slots=True)
class TruncatedTokens:
    """Prompt given as token ids (int32 [n]), cut at its end as in `TextBatch.truncate`."""

    ids: Int32
    truncate: int

    async def encode(self, text: TextModel, context: int) -> EncodedPrompt:
        """Return the first tokens, as many as allowed."""
        return EncodedPrompt(self.ids[: truncated_length(self.truncate, context) or None])

    def label_ids(self, text: TextModel) -> tuple[int, ...]:
        """Return no ids: an embedding has no next token."""
        return ()


def check_truncation(truncate: int | None) -> None:
    """Check the value of a request's `truncate_prompt_tokens`.

    Raises:
        ApiError: 400 if it is neither -1 nor a positive number.
    """
    if truncate is not None and truncate != WHOLE_CONTEXT and truncate < 1:
        text = "truncate_prompt_tokens must be a positive number, or -1 for the context length"
        raise invalid(text, "truncate_prompt_tokens", "out_of_range")
