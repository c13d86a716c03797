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
_QUOTES = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_JSON_NAMES = {"true": True, "false": False, "null": None}
MAX_LITERAL = 1 << 16
"""Maximum length of a literal in characters; a longer one is passed on as text."""


class LiteralScanner:
    """Incremental scanner that finds the `,` or `)` after a value; each character is scanned once.

    Only brackets and strings are tracked; the syntax between them is not checked.
    """

    __slots__ = ("_depth", "_escaped", "_quote", "done")

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
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
            pattern = _QUOTES[self._quote] if self._quote else _SPECIAL
            found = pattern.search(text, at)
            if found is None:
                return len(text)
            at = self._step(found)
        return at

    def _step(self, found: re.Match[str]) -> int:
        """Handle a quote, bracket, comma or backslash; return the index to continue at."""
        character = found[0]
        if self._quote:
            self._escaped = character == "\\"
            self._quote = self._quote if self._escaped else ""
        elif character in "\"'":
            self._quote = character
        elif character in "([{":
            self._depth += 1
        elif self._depth == 0:
            self.done = character in ",)"
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
        written = json.dumps(_evaluate(body), ensure_ascii=False, allow_nan=False)
        written.encode()  # fails on an unpaired surrogate, which cannot be sent as UTF-8
        return written
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return json.dumps(body, ensure_ascii=False)


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
            tree = ast.parse(body, mode="eval")
        except SyntaxError:  # models write line breaks in strings
            tree = ast.parse(body.replace("\n", "\\n"), mode="eval")
    return ast.literal_eval(_JsonNames().visit(tree))


class _JsonNames(ast.NodeTransformer):
    """Transformer that replaces JSON's names of constants by constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return a constant for `true`, `false` and `null`; other names stay, and are not literals."""
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node
