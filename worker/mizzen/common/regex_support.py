"""Check that a regular expression uses only features that the grammar compiler supports."""

from __future__ import annotations

from collections.abc import Iterator

_ESCAPED = ("\\\\", '\\"', "\\x22", "\\x5c", "\\x5C", "\\u0022", "\\u005c", "\\u005C")

_UNKNOWN = (*"123456789bBAZzpPkKGQE", "")
"""Characters that must not follow a backslash, because the grammar compiler does not support these escapes
(back references, boundaries, properties). The empty string stands for a backslash at the pattern's end."""


def pattern_fault(pattern: str, *, quoted: bool) -> str | None:
    """Return why the grammar compiler would misread a pattern, or None if it supports the pattern.

    A pattern must match the whole text. A `quoted` pattern is for the contents of a JSON string, in which
    characters that JSON escapes cannot be matched.
    """
    pieces = list(split_pattern(pattern))
    for index, (piece, in_class) in enumerate(pieces):
        if in_class:
            continue
        if piece == "^" and index:
            return "may have ^ only at its beginning: the whole text is matched"
        if piece == "$" and index < len(pieces) - 1:
            return "may have $ only at its end: the whole text is matched"
        following = [part for part, _ in pieces[index + 1 : index + 3]]
        if piece == "(" and following[:1] == ["?"] and following[1:] != [":"]:
            return "may have only plain groups and (?:...): no look-around, named groups or flags"
        if piece[0] == "\\" and piece[1:] in _UNKNOWN:
            return f"may not have {piece}"
        if quoted and (piece == '"' or piece in _ESCAPED):
            return "cannot match quotes or backslashes inside a JSON string"
    return None


def split_pattern(pattern: str) -> Iterator[tuple[str, bool]]:
    """Yield each character or escape of a pattern, and whether it belongs to a character class."""
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
