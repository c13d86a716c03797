# SPDX-License-Identifier: Apache-2.0
"""Tokenizes texts that begin alike, without tokenizing their common beginning for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from mizzen.gateway.text.tokenizer import Tokenizer

Beginning = TypeVar("Beginning", str, list[int])
LEAST_CHARACTERS = 1024
"""Number of common characters from which it pays to tokenize them once."""
TAIL_CHARACTERS = 128
"""Minimum number of common characters that are tokenized with each text, because the text that follows may
change the tokens before it."""


def encode_alike(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool = True
) -> list[list[int]]:
    """Return the token ids of each text.

    The common beginning is split at white space, well before its end. If its two parts have the same tokens
    as the whole, the first part's tokens are used for all texts. Otherwise, as with tokenizers that mark the
    begin of a text, each text is tokenized by itself.
    """
    common = common_beginning(texts) if len(texts) > 1 else ""
    cut = last_break(common, len(common) - TAIL_CHARACTERS)
    if len(common) < LEAST_CHARACTERS or cut <= 0:
        return tokenizer.encode_batch(texts, add_special_tokens)
    whole, beginning = tokenizer.encode_batch([common, common[:cut]], add_special_tokens)
    tail, *rests = tokenizer.encode_batch(
        [common[cut:], *(text[cut:] for text in texts)], add_special_tokens=False
    )
    if beginning + tail != whole:
        return tokenizer.encode_batch(texts, add_special_tokens)
    return [beginning + rest for rest in rests]


def common_beginning(texts: Sequence[Beginning]) -> Beginning:
    """Return the longest text, or the longest list of token ids, with which all texts or lists begin."""
    first, last = min(texts), max(texts)  # all others begin with what these two have in common
    pairs = enumerate(zip(first, last, strict=False))
    end = next((index for index, (one, other) in pairs if one != other), min(len(first), len(last)))
    return first[:end]


def last_break(text: str, end: int) -> int:
    """Return the last index up to `end` at which a space follows another character; -1 without any."""
    for index in range(min(end, len(text) - 1), 0, -1):
        if text[index] == " " and not text[index - 1].isspace():
            return index
    return -1
