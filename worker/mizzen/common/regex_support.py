"""What of regular expressions is matched as written, where a grammar is made of them."""

from __future__ import annotations

from collections.abc import Iterator

_ESCAPED = ("\\\\", '\\"', "\\x22", "\\x5c", "\\x5C", "\\u0022", "\\u005c", "\\u005C")

_UNKNOWN = (*"123456789bBAZzpPkKGQE", "")
"""Escapes that are no characters: references, borders and properties."""


def pattern_fault(pattern: str, *, quoted: bool) -> str | None:
    """Return what the compiler of grammars would read otherwise than a person; None where there is nothing.

    Patterns match from the first character to the last. `quoted` patterns stand in JSON strings, where
    nothing can be written that JSON escapes.
    """
    found = list(pieces(pattern))
    for index, (piece, in_class) in enumerate(found):
        if in_class:
            continue
        if piece == "^" and index:
            return "may have ^ at its beginning alone: the whole text is matched"
        if piece == "$" and index < len(found) - 1:
            return "may have $ at its end alone: the whole text is matched"
        behind = [part for part, _ in found[index + 1 : index + 3]]
        if piece == "(" and behind[:1] == ["?"] and behind[1:] != [":"]:
            return "may have plain groups and (?:...) alone: no looking around, names or flags"
        if piece[0] == "\\" and piece[1:] in _UNKNOWN:
            return f"may not have {piece}"
        if quoted and (piece == '"' or piece in _ESCAPED):
            return "cannot ask for quotes or backslashes inside of a JSON string"
    return None


def pieces(pattern: str) -> Iterator[tuple[str, bool]]:
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
