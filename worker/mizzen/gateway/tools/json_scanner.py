# SPDX-License-Identifier: Apache-2.0
"""Incremental scanner that finds the end of a JSON value."""

from __future__ import annotations

import re

WHITESPACE = " \t\r\n"
_SCALAR_ENDS = re.compile(r"[,}\]\s]")
_IN_STRING = re.compile(r'["\\]')
_BRACKETS = re.compile(r'["{}\[\]]')


class ValueScanner:
    """Incremental scanner of one JSON value, which starts with the first character that is scanned.

    Only brackets and strings are tracked; the syntax between them is not checked. Each character is scanned
    once.
    """

    __slots__ = ("_depth", "_escaped", "_scalar", "_started", "_string", "done")

    def __init__(self) -> None:
        self._depth = 0
        self._started = self._scalar = self._string = self._escaped = False
        self.done = False
        """True if the value has ended."""

    def scan(self, text: str, at: int) -> int:
        """Return the index after the part of `text[at:]` that belongs to the value."""
        while at < len(text) and not self.done:
            if self._escaped:
                self._escaped = False
                at += 1
            elif self._string:
                at = self._in_string(text, at)
            elif self._scalar:
                end = _SCALAR_ENDS.search(text, at)
                self.done = end is not None
                return end.start() if end else len(text)
            elif not self._started:
                self._started = True
                at = self._open(text, at)
            else:
                at = self._in_brackets(text, at)
        return at

    def _open(self, text: str, at: int) -> int:
        first = text[at]
        if first in "{[":
            self._depth = 1
        elif first == '"':
            self._string = True
        else:
            self._scalar = True
        return at + 1

    def _in_string(self, text: str, at: int) -> int:
        delimiter = _IN_STRING.search(text, at)
        if delimiter is None:
            return len(text)
        if delimiter[0] == "\\":
            self._escaped = True
        else:
            self._string = False
            self.done = self._depth == 0
        return delimiter.end()

    def _in_brackets(self, text: str, at: int) -> int:
        delimiter = _BRACKETS.search(text, at)
        if delimiter is None:
            return len(text)
        if delimiter[0] == '"':
            self._string = True
        elif delimiter[0] in "{[":
            self._depth += 1
        else:
            self._depth -= 1
            self.done = self._depth == 0
        return delimiter.end()


def skip_whitespace(text: str, at: int) -> int:
    """Return the index of the first character of `text[at:]` that is not white space."""
    while at < len(text) and text[at] in WHITESPACE:
        at += 1
    return at
