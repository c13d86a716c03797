"""What of regular expressions is matched as written."""

from __future__ import annotations

from collections.abc import Iterator

from mizzen.engine.grammar.errors import GrammarError

_ESCAPED = ("\\\\", '\\"', "\\x22", "\\x5c", "\\x5C", "\\u0022", "\\u005c", "\\u005C")

_SPECIAL = tuple("?" + sign for sign in "=!<P>#imsxua-(")
_UNKNOWN = (*"123456789bBAZzpPkKGQE", "")
"""Escapes that are no characters: references, borders and properties."""


def check_pattern(pattern: str, *, quoted: bool) -> None:
    """Refuse what the compiler would read otherwise than a person.

    Patterns match from the first character to the last. `quoted` patterns stand in JSON strings, where
    nothing can be written that JSON escapes.

    Raises:
        GrammarError: says what and why.
    """
    pieces = list(_pieces(pattern))
    for index, (piece, in_class) in enumerate(pieces):
        if in_class:
            continue
        if piece == "^" and index:
            raise GrammarError("may have ^ at its beginning alone: the whole text is matched")
        if piece == "$" and index < len(pieces) - 1:
            raise GrammarError("may have $ at its end alone: the whole text is matched")
        if piece == "(" and "".join(part for part, _ in pieces[index + 1 : index + 3]) in _SPECIAL:
            raise GrammarError("may have plain groups and (?:...) alone: no looking around, names or flags")
        if piece[0] == "\\" and piece[1:] in _UNKNOWN:
            raise GrammarError(f"may not have {piece}")
        if quoted and (piece == '"' or piece in _ESCAPED):
            raise GrammarError("cannot ask for quotes or backslashes inside of a JSON string")


def one_line(pattern: str) -> str:
    """Return the pattern with a dot that is any character but the end of a line."""
    return "".join(r"[^\n\r]" if piece == "." and not inside else piece for piece, inside in _pieces(pattern))


def _pieces(pattern: str) -> Iterator[tuple[str, bool]]:
    """Yield characters and escapes, and whether they stand in a class."""
    index, in_class = 0, False
    while index < len(pattern):
        piece = pattern[index]
        if piece == "\\":
            width = {"x": 4, "u": 6}.get(pattern[index + 1 : index + 2], 2)
            piece = pattern[index : index + width]
        elif piece == "[" and not in_class:
            in_class = True
        elif piece == "]" and in_class:
            in_class = False
        yield piece, in_class or piece == "]"
        index += len(piece)
