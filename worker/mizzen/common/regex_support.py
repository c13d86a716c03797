# SPDX-License-Identifier: Apache-2.0
"""Checks that a regular expression uses only features that grammars enforce."""

from __future__ import annotations

from mizzen.common.regex_tree import (
    SURROGATES,
    Characters,
    Choice,
    Concatenation,
    Node,
    Ranges,
    RegexError,
    Repeat,
    character_set,
    invert_ranges,
    merge_ranges,
    parse_regex,
    subtract_ranges,
)

JSON_ESCAPED: Ranges = character_set((0, 0x1F), 0x22, 0x5C)
"""Characters that JSON strings contain only as escapes."""
NOT_IN_JSON = merge_ranges(JSON_ESCAPED, SURROGATES)


def pattern_fault(pattern: str, *, quoted: bool) -> str | None:
    """Return why a grammar cannot enforce a pattern, or None if it can.

    A pattern must match the whole text. A `quoted` pattern is for the contents of a JSON string, in which
    characters that JSON escapes cannot be matched.
    """
    try:
        read_pattern(pattern, quoted=quoted)
    except RegexError as error:
        return str(error)
    return None


def read_pattern(pattern: str, *, quoted: bool) -> Node:
    """Return the tree of a pattern; that of a `quoted` one contains no characters that JSON escapes.

    Raises:
        RegexError: A grammar cannot enforce the pattern.
    """
    node = parse_regex(pattern)
    return without_escaped(node) if quoted else node


def without_escaped(node: Node) -> Node:
    """Return a tree without the characters that JSON escapes.

    Raises:
        RegexError: Only such characters match in some place.
    """
    if isinstance(node, Characters):
        ranges = subtract_ranges(node.ranges, NOT_IN_JSON)
        if not ranges:
            raise RegexError("cannot match quotes or backslashes inside a JSON string")
        return Characters(ranges)
    if isinstance(node, Concatenation):
        return Concatenation(tuple(without_escaped(part) for part in node.parts))
    if isinstance(node, Choice):
        return Choice(tuple(without_escaped(part) for part in node.alternatives))
    return Repeat(without_escaped(node.part), node.low, node.high)


def any_json_character() -> Characters:
    """Return one character of a JSON string that is not an escape."""
    return Characters(invert_ranges(NOT_IN_JSON))
