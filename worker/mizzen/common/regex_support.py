"""Which features of regular expressions grammars support as written."""

from __future__ import annotations

from collections.abc import Iterator

_ESCAPED = ("\\\\", '\\"', "\\x22", "\\x5c", "\\x5C", "\\u0022", "\\u005c", "\\u005C")

_UNKNOWN = (*"123456789bBAZzpPkKGQE", "")
"""Escapes that do not stand for a character: back references, boundaries and properties."""


def pattern_fault(pattern: str, *, quoted: bool) -> str | None:
    """Return why the grammar compiler would misread a pattern, or None if it would not.

    A pattern must match the whole text. A `quoted` pattern stands inside a JSON string, where characters
    that JSON escapes cannot be matched.
    """
    found = list(pieces(pattern))
    for index, (piece, in_class) in enumerate(found):
        if in_class:
            continue
        if piece == "^" and index:
            return "may have ^ only at its beginning: the whole text is matched"
        if piece == "$" and index < len(found) - 1:
            return "may have $ only at its end: the whole text is matched"
        behind = [part for part, _ in found[index + 1 : index + 3]]
        if piece == "(" and behind[:1] == ["?"] and behind[1:] != [":"]:
            return "may have only plain groups and (?:...): no look-around, named groups or flags"
        if piece[0] == "\\" and piece[1:] in _UNKNOWN:
            return f"may not have {piece}"
        if quoted and (piece == '"' or piece in _ESCAPED):
            return "cannot match quotes or backslashes inside a JSON string"
    return None


def pieces(pattern: str) -> Iterator[tuple[str, bool]]:
    """Yield each character or escape of a pattern, and whether it is inside a character class."""
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
