# SPDX-License-Identifier: Apache-2.0
"""Literals of Python: where they end in text that may continue, and their conversion to JSON."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

import msgspec

from mizzen.gateway.tools.json_scanner import WHITESPACE

_SPECIAL = re.compile(r"[\"'()\[\]{},]")
_STRING_ENDS = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_STRING = re.compile(r'"""[\s\S]*?"""|\'\'\'[\s\S]*?\'\'\'|"(?:[^"\\]|\\[\s\S])*"|\'(?:[^\'\\]|\\[\s\S])*\'')
_LINE_BREAK = re.compile(r"\\[\s\S]|\r|\n")
_ESCAPES = {"\n": "\\n", "\r": "\\r"}
_JSON_NAMES = {"true": True, "false": False, "null": None}
MAX_LITERAL = 1 << 16
"""Maximum length of a literal in characters; a longer one is passed on as text."""


class LiteralScanner:
    """Incremental scanner that finds the character after a value; each character is scanned once.

    Only brackets and strings are tracked; the syntax between them is not checked.
    """

    __slots__ = ("_depth", "_ends", "_escaped", "_opening", "_quote", "_quotes", "done")

    def __init__(self, ends: str = ",)") -> None:
        """Begin a value that one of the characters in `ends` follows: commas and closing brackets."""
        self._ends = ends
        self._depth = 0
        self._quote = ""
        """Delimiter of the string that the value is in."""
        self._opening = ""
        """Quote of a string that has just begun, while one or two quotes may be the start of three."""
        self._quotes = 0
        """Number of consecutive quotes that open a string, or that may close one with three quotes."""
        self._escaped = False
        self.done = False
        """True if the value has ended."""

    def scan(self, text: str, at: int) -> int:
        """Return the index after the part of `text[at:]` that belongs to the value."""
        while at < len(text) and not self.done:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            if self._opening:
                at = self._open_string(text, at)
                continue
            pattern = _STRING_ENDS[self._quote[:1]] if self._quote else _SPECIAL
            found = pattern.search(text, at)
            if found is None:
                self._quotes = 0
                return len(text)
            if found.start() > at:
                self._quotes = 0
            at = self._step(found)
        return at

    def _open_string(self, text: str, at: int) -> int:
        """Read what follows the quotes that open a string: one, two (an empty string) or three."""
        if text[at] == self._opening and self._quotes < 2:
            self._quotes += 1
            return at + 1
        third = text[at] == self._opening
        quote, self._opening = self._opening, ""
        self._quote = quote * 3 if third else quote if self._quotes == 1 else ""
        self._quotes = 0
        return at + third

    def _step(self, found: re.Match[str]) -> int:
        """Handle a quote, bracket, comma or backslash; return the index to continue at."""
        character = found[0]
        if self._quote:
            self._escaped = character == "\\"
            self._quotes = 0 if self._escaped else self._quotes + 1
            if self._quotes == len(self._quote):
                self._quote, self._quotes = "", 0
        elif character in "\"'":
            self._opening, self._quotes = character, 1
        elif character in "([{":
            self._depth += 1
        elif self._depth == 0:
            self.done = character in self._ends
            return found.start() if self.done else found.end()
        elif character != ",":
            self._depth -= 1
        return found.end()


def literal_as_json(text: str) -> str:
    """Return the JSON text of a literal; `true`, `false` and `null` are accepted, too.

    Text that is not a literal of JSON values becomes a JSON string.
    """
    body = text.strip(WHITESPACE)
    try:
        msgspec.json.decode(body)
        return body
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return _write(json.loads(body, strict=False))  # JSON with line breaks in strings
    except (ValueError, RecursionError):
        pass
    try:
        return _write(_evaluate(body))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return json.dumps(body, ensure_ascii=False)


def _write(value: Any) -> str:
    """Return a value as JSON.

    Raises:
        ValueError, TypeError, RecursionError: JSON has no such value, or it has an unpaired surrogate, which
            cannot be sent as UTF-8.
    """
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    written.encode()
    return written


def _evaluate(body: str) -> Any:
    """Return the value of a literal.

    Raises:
        ValueError, TypeError, SyntaxError, RecursionError, MemoryError: it is not a literal.
    """
    if len(body) > MAX_LITERAL:
        raise ValueError("the literal is too long")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # unknown escape sequences
        try:
            tree = _parse(body)
        except SyntaxError:  # models write line breaks in strings
            tree = _parse(_STRING.sub(_escape_line_breaks, body))
    return ast.literal_eval(_JsonNames().visit(tree))


def _parse(body: str) -> ast.Expression:
    """Return the syntax tree of an expression.

    Before Python 3.11.8, `ast.parse` raises SystemError if a finalizer that runs meanwhile parses source too
    (python/cpython#106905); the second attempt succeeds.
    """
    try:
        return ast.parse(body, mode="eval")
    except SystemError:
        return ast.parse(body, mode="eval")


def _escape_line_breaks(literal: re.Match[str]) -> str:
    """Return the literal of a string with its line breaks as escape sequences."""
    return _LINE_BREAK.sub(lambda part: _ESCAPES.get(part[0], part[0]), literal[0])


class _JsonNames(ast.NodeTransformer):
    """Transformer that replaces JSON's names of constants by constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return a constant for `true`, `false` and `null`; other names stay, and are not literals."""
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node
