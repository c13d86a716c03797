# SPDX-License-Identifier: Apache-2.0
"""Converts regular expressions, and sets of property names, to EBNF rules for xgrammar.

xgrammar's own conversion of patterns in JSON strings lets some texts through that do not match.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mizzen.common.regex_support import NOT_IN_JSON, any_json_character, read_pattern
from mizzen.common.regex_tree import (
    MAX_CHARACTER,
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
    is_single,
    subtract_ranges,
)
from mizzen.engine.grammar.errors import GrammarError
from mizzen.engine.grammar.long_repetitions import MIN_LONG_COUNT, RuleNames, repetition_rules


def check_pattern(pattern: str, *, quoted: bool) -> Node:
    """Return the tree of a pattern; see `read_pattern`.

    Raises:
        GrammarError: A grammar cannot enforce the pattern; the message names the construct and the reason.
    """
    try:
        return read_pattern(pattern, quoted=quoted)
    except RegexError as error:
        raise GrammarError(str(error)) from None


def regex_to_ebnf(pattern: str) -> str:
    """Return EBNF rules of the texts that a pattern matches.

    Raises:
        GrammarError: A grammar cannot enforce the pattern.
    """
    rules = RegexRules("r")
    body = rules.expression(check_pattern(pattern, quoted=False))
    return "\n".join([f"root ::= {body}", *rules.lines()])


class RegexRules:
    """EBNF expressions of patterns, and the rules that these expressions refer to."""

    def __init__(self, prefix: str) -> None:
        """Begin without rules; `prefix` begins the names of all rules."""
        self._names = RuleNames(prefix)

    def lines(self) -> Iterator[str]:
        """Yield the rules that the expressions refer to."""
        return self._names.lines()

    def expression(self, node: Node) -> str:
        """Return the EBNF expression of a tree."""
        if isinstance(node, Characters):
            return class_text(node.ranges)
        if isinstance(node, Concatenation):
            return self._sequence(node.parts)
        if isinstance(node, Choice):
            return "(" + " | ".join(self.expression(part) for part in node.alternatives) + ")"
        return self._repetition(node)

    def _sequence(self, parts: tuple[Node, ...]) -> str:
        pieces, literal = [], ""
        for part in parts:
            if isinstance(part, Characters) and is_single(part.ranges):
                literal += chr(part.ranges[0][0])
                continue
            if literal:
                pieces.append(literal_text(literal))
                literal = ""
            pieces.append(self.expression(part))
        if literal or not pieces:
            pieces.append(literal_text(literal))
        return f"({' '.join(pieces)})"

    def _repetition(self, node: Repeat) -> str:
        if node.high == 0:
            return '""'
        item = self.expression(node.part)
        if not isinstance(node.part, Characters):
            item = f"({item})"
        elif max(node.low, node.high or 0) >= MIN_LONG_COUNT:
            return repetition_rules(self._names, item, node.low, node.high)
        if node.high is None:
            return item + {0: "*", 1: "+"}.get(node.low, f"{{{node.low},}}")
        return item + ("?" if (node.low, node.high) == (0, 1) else f"{{{node.low},{node.high}}}")


def other_names(rules: RuleNames, described: Iterable[str]) -> str:
    """Return the name of a rule for all names without escapes, except the described ones.

    Escapes are left out because they could spell a described name in another way. The rules for the prefixes
    of the described names are added to `rules`.
    """
    children, ends = _prefix_tree(name for name in described if not _is_escaped(name))
    any_character = any_json_character().ranges
    expressions: dict[int, str] = {}
    for node in reversed(range(len(children))):
        others = subtract_ranges(any_character, character_set(*map(ord, children[node])))
        alternatives = [] if node in ends else ['""']
        alternatives.append(f"{class_text(others)} {class_text(any_character)}*")
        alternatives += [f"{literal_text(first)} {expressions[n]}" for first, n in children[node].items()]
        expressions[node] = rules.name(" | ".join(alternatives))
    return expressions[0]


def _prefix_tree(names: Iterable[str]) -> tuple[list[dict[str, int]], set[int]]:
    """Return the nodes by character of each prefix, beginning with the empty one, and the nodes of names.

    A longer prefix has a higher number.
    """
    children: list[dict[str, int]] = [{}]
    ends: set[int] = set()
    for name in names:
        node = 0
        for character in name:
            node = children[node].setdefault(character, len(children))
            if node == len(children):
                children.append({})
        ends.add(node)
    return children, ends


def _is_escaped(name: str) -> bool:
    """Return whether JSON can write a name only with escapes."""
    return any(low <= ord(character) <= high for character in name for low, high in NOT_IN_JSON)


def literal_text(text: str) -> str:
    """Return the EBNF literal of a text."""
    return '"' + "".join(_escaped(character, '"\\') for character in text) + '"'


def class_text(ranges: Ranges) -> str:
    """Return the EBNF expression of one character of a set."""
    ranges = subtract_ranges(ranges, SURROGATES)
    if is_single(ranges):
        return literal_text(chr(ranges[0][0]))
    inverted = ranges[-1][1] == MAX_CHARACTER
    shown = invert_ranges(ranges) if inverted else ranges
    text = "".join(
        _escaped(chr(low), '[]^-\\"') + ("" if low == high else "-" + _escaped(chr(high), '[]^-\\"'))
        for low, high in shown
    )
    return f"[{'^' if inverted else ''}{text}]"


def _escaped(character: str, special: str) -> str:
    code = ord(character)
    if 0x20 <= code < 0x7F and character not in special:
        return character
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
