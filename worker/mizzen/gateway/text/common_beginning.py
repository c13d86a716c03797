# SPDX-License-Identifier: Apache-2.0
"""Tokenizes texts that begin alike, without tokenizing their common beginning for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from mizzen.gateway.text.tokenizer import Tokenizer

Prefix = TypeVar("Prefix", str, list[int])
LEAST_CHARACTERS = 1024
"""Number of common characters from which it pays to tokenize them once."""
TAIL_CHARACTERS = 128
"""Minimum number of common characters that are tokenized with each text, because the text that follows may
change the tokens before it."""
COMPARED_ITEMS = 256
"""Number of characters or token ids that are compared at once."""
MAX_BEGINNINGS = 16
"""Maximum number of beginnings whose tokens an encoder keeps."""


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """The tokens of all texts that begin like `source`, at least up to `TAIL_CHARACTERS` after `end`."""

    source: str
    end: int
    """Number of characters that the tokens cover."""
    ids: list[int]
    """Token ids of `source[:end]`, after the special tokens at the begin of a prompt."""
    add_special_tokens: bool

    def fits(self, text: str) -> bool:
        """Return whether a text has these tokens."""
        return text.startswith(self.source[: self.end + TAIL_CHARACTERS])


class PrefixEncoder:
    """Tokenizes texts that begin alike, or like earlier texts, as prompts of a program do. Not thread-safe.

    A beginning is split off at white space, well before the end of what texts have in common. Its tokens are
    kept if they and those of the other part are the tokens of the whole. Otherwise, as with tokenizers that
    mark the begin of a text, each text is tokenized by itself.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._beginnings: list[Beginning] = []  # the most recently used one is the last

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text."""
        common = common_beginning(texts)
        known = self._find(common, add_special_tokens)
        if len(common) - known.end >= LEAST_CHARACTERS:
            # Texts that part from an earlier one, as forks do, get a beginning that they share with it.
            shared = (common_beginning([common, each.source]) for each in self._beginnings)
            longest = max(shared, key=len, default="")
            known = self._extend(known, longest if len(longest) - known.end >= LEAST_CHARACTERS else common)
        rests = [text[known.end :] for text in texts]
        special = add_special_tokens and not known.end
        return [known.ids + rest for rest in self._tokenizer.encode_batch(rests, special)]

    def _find(self, text: str, add_special_tokens: bool) -> Beginning:
        """Return the longest known beginning of a text, possibly an empty one."""
        empty = Beginning("", 0, [], add_special_tokens)
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
        beginning = Beginning(text, end, known.ids + ids[: -len(tail)], known.add_special_tokens)
        self._beginnings = [*self._beginnings[1 - MAX_BEGINNINGS :], beginning]
        return beginning


def common_beginning(texts: Sequence[Prefix]) -> Prefix:
    """Return the longest text, or the longest list of token ids, with which all texts or lists begin."""
    first, last = min(texts), max(texts)  # all others begin with what these two have in common
    end, begin = min(len(first), len(last)), 0
    while begin < end and first[begin : begin + COMPARED_ITEMS] == last[begin : begin + COMPARED_ITEMS]:
        begin += COMPARED_ITEMS
    while begin < end and first[begin] == last[begin]:
        begin += 1
    return first[: min(begin, end)]


def last_break(text: str, end: int) -> int:
    """Return the last index up to `end` at which a space follows another character; -1 without any."""
    for index in range(min(end, len(text) - 1), 0, -1):
        if text[index] == " " and not text[index - 1].isspace():
            return index
    return -1
