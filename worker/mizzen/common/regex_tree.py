# SPDX-License-Identifier: Apache-2.0
"""Parses regular expressions into trees.

The parser accepts the syntax that ECMA 262 and Python's `re` read alike. Everything else is an error, so a
grammar never enforces something other than the pattern. A pattern must match a whole text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

MAX_CHARACTER = 0x10FFFF
MAX_COUNT = 65_535
"""Highest count of a repetition."""
MAX_GROUP_DEPTH = 64
"""Highest number of groups inside each other."""

Ranges = tuple[tuple[int, int], ...]
"""A set of characters: the first and last code point of each range, in ascending order, without overlaps."""


class RegexError(ValueError):
    """A pattern is not supported; the message continues a sentence that begins with "the pattern"."""


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Parts that follow one another."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any one of several alternatives."""

    alternatives: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part that is repeated `low` to `high` times; any number of times from `low` if `high` is None."""

    part: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Anchors:
    """Anchors of a part: whether one of its alternatives begins with ^, and whether one ends with $."""

    begins: bool = False
    ends: bool = False


Node = Characters | Concatenation | Choice | Repeat


def merge_ranges(*sets: Ranges) -> Ranges:
    """Return the union of sets of characters."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pair for ranges in sets for pair in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def invert_ranges(ranges: Ranges) -> Ranges:
    """Return all characters that are not in a set."""
    inverted, start = [], 0
    for low, high in ranges:
        if low > start:
            inverted.append((start, low - 1))
        start = high + 1
    if start <= MAX_CHARACTER:
        inverted.append((start, MAX_CHARACTER))
    return tuple(inverted)


def subtract_ranges(ranges: Ranges, removed: Ranges) -> Ranges:
    """Return the characters of a set that are not in another set."""
    return invert_ranges(merge_ranges(invert_ranges(ranges), removed))


def character_set(*characters: int | tuple[int, int]) -> Ranges:
    """Return the set of some code points and ranges of code points."""
    return merge_ranges(tuple(c if isinstance(c, tuple) else (c, c) for c in characters))


DIGITS = character_set((0x30, 0x39))
WORD = character_set((0x30, 0x39), (0x41, 0x5A), 0x5F, (0x61, 0x7A))
SPACES = character_set((9, 13), 0x20, 0xA0, 0x1680, (0x2000, 0x200A), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)
r"""Characters that `\s` matches both in ECMA 262 and in Python."""
ANY_SPACES = merge_ranges(SPACES, character_set((0x1C, 0x1F), 0x85, 0xFEFF))
r"""Characters that `\s` matches in ECMA 262 or in Python; `\S` matches none of them."""
SURROGATES = character_set((0xD800, 0xDFFF))
LINE_ENDS = character_set(0x0A, 0x0D, 0x2028, 0x2029)
CONTROL_ESCAPES = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B}

_COUNTS = re.compile(r"\{(\d+)(?:(,)(\d*))?\}", re.ASCII)
_NO_LOW_COUNT = re.compile(r"\{,\d+\}")
_HEX = re.compile("[0-9A-Fa-f]+")


def parse_regex(pattern: str) -> Node:
    """Return the tree of a pattern.

    Raises:
        RegexError: The pattern is malformed, or uses something that is not supported.
    """
    return _Parser(pattern).parse_pattern()


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.index = 0
        self.depth = 0

    def parse_pattern(self) -> Node:
        node = self.parse_choice(at_start=True)[0]
        if self.index < len(self.pattern):
            self.fail("has a closing parenthesis without an opening one")
        return node

    def fail(self, reason: str) -> NoReturn:
        raise RegexError(reason)

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.index)

    def take(self, text: str) -> bool:
        if not self.peek(text):
            return False
        self.index += len(text)
        return True

    def parse_choice(self, at_start: bool) -> tuple[Node, Anchors]:
        """Parse alternatives up to a closing parenthesis or the end; `at_start`: nothing precedes them."""
        alternatives, anchors = [], Anchors()
        while True:
            node, own = self.parse_sequence(at_start)
            alternatives.append(node)
            anchors = Anchors(anchors.begins or own.begins, anchors.ends or own.ends)
            if not self.take("|"):
                return (alternatives[0] if len(alternatives) == 1 else Choice(tuple(alternatives))), anchors

    def parse_sequence(self, at_start: bool) -> tuple[Node, Anchors]:
        parts: list[Node] = []
        begins = ends = False
        while self.index < len(self.pattern) and not self.peek("|") and not self.peek(")"):
            if self.take("^"):
                if not at_start or parts or begins:
                    self.fail("may have ^ only at its beginning: the whole text is matched")
                begins = True
                continue
            if ends:
                self.fail("may have $ only at its end: the whole text is matched")
            if self.take("$"):
                ends = True
                continue
            part, anchors = self.parse_repetition(at_start and not parts)
            parts.append(part)
            begins, ends = begins or anchors.begins, anchors.ends
        return (parts[0] if len(parts) == 1 else Concatenation(tuple(parts))), Anchors(begins, ends)

    def parse_repetition(self, at_start: bool) -> tuple[Node, Anchors]:
        part, anchors = self.parse_atom(at_start)
        counts = self.parse_counts()
        if counts is None:
            return part, anchors
        if anchors.begins or anchors.ends:
            self.fail("may not repeat a group with ^ or $")
        self.take("?")  # a lazy repetition matches the same texts
        if self.parse_counts() is not None:
            self.fail("repeats a repetition: put it into a group")
        return Repeat(part, *counts), anchors

    def parse_counts(self) -> tuple[int, int | None] | None:
        """Parse a quantifier; return its counts, or None if none follows."""
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(sign):
                return counts
        found = _COUNTS.match(self.pattern, self.index)
        if found is None:
            if _NO_LOW_COUNT.match(self.pattern, self.index):
                self.fail("may not have {,n}: write {0,n}")
            return None
        self.index = found.end()
        low = high = read_count(found[1])
        if found[2]:
            high = read_count(found[3]) if found[3] else None
        if max(low, high or 0) > MAX_COUNT:
            self.fail(f"repeats more than {MAX_COUNT} times")
        if high is not None and high < low:
            self.fail(f"has a repetition {found[0]} whose first count is the larger one")
        return low, high

    def parse_atom(self, at_start: bool) -> tuple[Node, Anchors]:
        if self.take("("):
            return self.parse_group(at_start)
        if self.take("["):
            ranges = self.parse_class()
        elif self.take("."):
            ranges = invert_ranges(LINE_ENDS)
        elif self.take("\\"):
            ranges = self.parse_escape(wide=False)
        elif self.parse_counts() is not None:
            self.fail("repeats nothing")
        else:
            ranges = self.parse_plain()
        return Characters(ranges), Anchors()

    def parse_plain(self) -> Ranges:
        character = self.pattern[self.index]
        self.index += 1
        return self.single(ord(character))

    def single(self, code: int) -> Ranges:
        if 0xD800 <= code <= 0xDFFF:
            self.fail("may not have half a surrogate pair: write the character itself")
        return ((code, code),)

    def parse_group(self, at_start: bool) -> tuple[Node, Anchors]:
        if self.peek("?") and not self.take("?:"):
            self.fail("may have only plain groups and (?:...): no look-around, named groups or flags")
        self.depth += 1
        if self.depth > MAX_GROUP_DEPTH:
            self.fail(f"has more than {MAX_GROUP_DEPTH} groups inside each other")
        node, anchors = self.parse_choice(at_start)
        if not self.take(")"):
            self.fail("has an opening parenthesis without a closing one")
        self.depth -= 1
        return node, anchors

    def parse_class(self) -> Ranges:
        inverted = self.take("^")
        if self.peek("]"):
            self.fail("has an empty character class: write \\] for a bracket")
        members: list[Ranges] = []
        start = self.index
        while not self.take("]"):
            if self.index >= len(self.pattern):
                self.fail("has a character class that is not closed")
            first = self.parse_member(inverted)
            if self.peek("-") and not self.peek("-]"):
                self.index += 1
                if self.index >= len(self.pattern):
                    self.fail("has a character class that is not closed")
                last = self.parse_member(inverted)
                if not is_single(first) or not is_single(last) or first > last:
                    self.fail("has a range of characters with a wrong bound")
                first = ((first[0][0], last[0][1]),)
            members.append(first)
        union = merge_ranges(*members)
        ranges = invert_ranges(union) if inverted else union
        if not ranges:
            self.fail("has a character class that matches nothing")
        escapes = re.findall(r"\\(.)", self.pattern[start : self.index])
        if not inverted and "s" in escapes and "S" in escapes:
            return invert_ranges(())  # every character, although \s and \S leave out some
        return ranges

    def parse_member(self, inverted: bool) -> Ranges:
        return self.parse_escape(wide=inverted) if self.take("\\") else self.parse_plain()

    def parse_escape(self, *, wide: bool) -> Ranges:
        """Parse an escape behind its backslash; `wide`: the set is about to be inverted."""
        letter = self.pattern[self.index : self.index + 1]
        self.index += 1
        if letter in ("s", "S"):
            spaces = ANY_SPACES if wide == (letter == "s") else SPACES
            return spaces if letter == "s" else invert_ranges(spaces)
        if letter in ("d", "D", "w", "W"):
            members = DIGITS if letter in "dD" else WORD
            return members if letter.islower() else invert_ranges(members)
        if letter in CONTROL_ESCAPES:
            return self.single(CONTROL_ESCAPES[letter])
        width = {"x": 2, "u": 4}.get(letter)
        if width is not None:
            digits = self.pattern[self.index : self.index + width]
            if len(digits) < width or not _HEX.fullmatch(digits):
                self.fail(f"may not have \\{letter} without {width} hexadecimal digits")
            self.index += width
            return self.single(int(digits, 16))
        if not letter or letter.isalnum() or ord(letter) > 127:
            self.fail(f"may not have \\{letter}")
        return self.single(ord(letter))


def read_count(digits: str) -> int:
    """Return a count of a repetition; MAX_COUNT + 1 for one with more than eight digits."""
    return int(digits) if len(digits) < 9 else MAX_COUNT + 1


def is_single(ranges: Ranges) -> bool:
    """Return whether a set has exactly one character."""
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
