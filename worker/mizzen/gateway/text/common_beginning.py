# SPDX-License-Identifier: Apache-2.0
"""Tokenizes texts that begin alike, without tokenizing their common beginning for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mizzen.core.request import Int32
from mizzen.gateway.text.tokenizer import Tokenizer

TokenIds = Sequence[int] | Int32
"""Ids of the tokens of a text, as numbers or as int32 [n]."""
LEAST_CHARACTERS = 1024
"""Number of common characters from which it pays to tokenize them once."""
TAIL_CHARACTERS = 128
"""Minimum number of common characters that are tokenized with each text, because the text that follows may
change the tokens before it."""
COMPARED_CHARACTERS = 256
"""Number of characters that are compared at once."""
MAX_BEGINNINGS = 16
"""Maximum number of beginnings whose tokens an encoder keeps."""


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """The tokens of all texts that begin with `source`."""

    source: str
    """Text that the tokens cover, and `TAIL_CHARACTERS` after it."""
    end: int
    """Number of characters that the tokens cover."""
    ids: Int32
    """Token ids of `source[:end]`, after the special tokens at the begin of a prompt, int32 [n]."""
    add_special_tokens: bool

    def fits(self, text: str) -> bool:
        """Return whether a text has these tokens."""
        return text.startswith(self.source)


class PrefixEncoder:
    """Tokenizes texts that begin alike, or like earlier texts, as prompts of a program do. Not thread-safe.

    A beginning is split off at white space, well before the end of what texts have in common. Its tokens are
    kept if they and those of the other part are the tokens of the whole. Otherwise, as with tokenizers that
    mark the begin of a text, each text is tokenized by itself.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._beginnings: list[Beginning] = []  # the most recently used one is the last

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Int32]:
        """Return the token ids of each text, int32 [n]."""
        common = common_beginning(texts)
        known = self._find(common, add_special_tokens)
        if len(common) - known.end >= LEAST_CHARACTERS:
            # Texts that part from an earlier one, as forks do, get a beginning that they share with it.
            shared = (common_beginning([common, each.source]) for each in self._beginnings)
            longest = max(shared, key=len, default="")
            known = self._extend(known, longest if len(longest) - known.end >= LEAST_CHARACTERS else common)
        rests = [text[known.end :] for text in texts]
        ids = self._tokenizer.encode_batch(rests, add_special_tokens and not known.end)
        return [join_ids(known.ids, rest) for rest in ids]

    def _find(self, text: str, add_special_tokens: bool) -> Beginning:
        """Return the longest known beginning of a text, possibly an empty one."""
        empty = Beginning("", 0, np.empty(0, np.int32), add_special_tokens)
        same = [each for each in self._beginnings if each.add_special_tokens == add_special_tokens]
        found = max((each for each in same if each.fits(text)), key=lambda each: each.end, default=empty)
        if found.end:
            self._beginnings.remove(found)
            self._beginnings.append(found)
        return found

    def _extend(self, known: Beginning, text: str) -> Beginning:
        """Return a longer beginning of a text than the known one, and keep it; or the known one."""
        end = last_break(text, len(text) - TAIL_CHARACTERS)
        if end <= known.end:
            return known
        near = text[max(0, end - TAIL_CHARACTERS) :]
        around, tail = self._tokenizer.encode_batch([near, text[end:]], False)
        if around[-len(tail) :] != tail:  # so the whole would not end with these tokens, either
            return known
        special = known.add_special_tokens and not known.end
        [ids] = self._tokenizer.encode_batch([text[known.end :]], special)
        if ids[-len(tail) :] != tail:
            return known
        tokens = join_ids(known.ids, ids[: -len(tail)])
        beginning = Beginning(text[: end + TAIL_CHARACTERS], end, tokens, known.add_special_tokens)
        self._beginnings = [*self._beginnings[1 - MAX_BEGINNINGS :], beginning]
        return beginning


def join_ids(beginning: Int32, rest: list[int]) -> Int32:
    """Return the token ids of a beginning and those after it, int32 [n]."""
    return np.concatenate((beginning, np.array(rest, np.int32)))


def count_common_tokens(prompts: Sequence[TokenIds]) -> int:
    """Return the number of token ids with which all prompts begin."""
    shortest = min(map(len, prompts))
    table = np.array([prompt[:shortest] for prompt in prompts], np.int32)
    differ = (table != table[0]).any(axis=0)
    return int(differ.argmax()) if differ.any() else shortest


def common_beginning(texts: Sequence[str]) -> str:
    """Return the longest text with which all texts begin."""
    first, last = min(texts), max(texts)  # all others begin with what these two have in common
    end, begin, block = min(len(first), len(last)), 0, COMPARED_CHARACTERS
    while begin < end and first[begin : begin + block] == last[begin : begin + block]:
        begin += block
    while begin < end and first[begin] == last[begin]:
        begin += 1
    return first[: min(begin, end)]


def last_break(text: str, end: int) -> int:
    """Return the last index up to `end` at which a space follows another character; -1 without any."""
    for index in range(min(end, len(text) - 1), 0, -1):
        if text[index] == " " and not text[index - 1].isspace():
            return index
    return -1
