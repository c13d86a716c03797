# SPDX-License-Identifier: Apache-2.0
"""EBNF rules for long repetitions of one character, whose compilation does not depend on the count.

A grammar has a state for each character of a repetition `c{0,2000}`, and the compiler matches the whole
vocabulary in every state. Therefore a long repetition is divided into blocks of 16 to 32 characters, and all
blocks share the states of one rule: `c{0,2000}` becomes `block{0,62} c{0,16}`, which matches the same texts.
A token must not extend beyond the block in which it begins. This excludes only tokens with more than 16
characters, and only in some places, because a block may end after any of its last 16 characters.
"""

from __future__ import annotations

from collections.abc import Iterator

BLOCK = 16
"""Least number of characters in a block; a block has at most twice as many."""
MIN_LONG_COUNT = 4 * BLOCK
"""Counts from which a repetition is divided into blocks."""
MAX_FIXED_COUNT = 8 * BLOCK
"""Highest count of a repetition of nearly fixed length that is not divided, so that any tokens fit."""
ENDS_WITH_TOKEN = r"(=[\x01])"
"""Lookahead that no text fulfils; it excludes tokens that extend beyond a block, which are slow to try."""


class RuleNames:
    """Rules by their texts, so that equal rules are defined, and compiled, only once."""

    def __init__(self, prefix: str) -> None:
        """Begin without rules; `prefix` begins the names of all rules."""
        self._prefix = prefix
        self._names: dict[str, str] = {}

    def name(self, body: str) -> str:
        """Return the name of the rule with a body; define the rule if it is new."""
        return self._names.setdefault(body, f"{self._prefix}_{len(self._names)}")

    def lines(self) -> Iterator[str]:
        """Yield the definitions of all rules."""
        return (f"{name} ::= {body}" for body, name in self._names.items())


def repetition_rules(rules: RuleNames, item: str, low: int, high: int | None) -> str:
    """Return an EBNF expression of `low` to `high` times `item`; without `high` there is no upper limit.

    The rules that the expression needs are added to `rules`.
    """
    if high is not None and high <= MAX_FIXED_COUNT and high - low < 2 * BLOCK:
        return f"{item}{{{low},{high}}}"
    fixed, low_rest = max(0, low - BLOCK) // (2 * BLOCK), low
    parts: list[str] = []
    if fixed:
        whole = rules.name(f"({' '.join([item] * (2 * BLOCK))}) {ENDS_WITH_TOKEN}")
        parts.append(f"{whole}{{{fixed}}}")
        low_rest = low - 2 * BLOCK * fixed
    high_rest = None if high is None else high - 2 * BLOCK * fixed
    parts.append(_open_repetition(rules, item, low_rest, high_rest))
    return f"({' '.join(parts)})"


def _open_repetition(rules: RuleNames, item: str, low: int, high: int | None) -> str:
    """Return an expression of `low`, at most 3 * BLOCK, to `high` times `item`."""
    if high is None:
        return f"{item}{{{low}}} {item}*" if low else f"{item}*"
    if high < MIN_LONG_COUNT:
        return rules.name(f"{item}{{{low},{high}}}")
    block = _block(rules, item, BLOCK)
    if not low:
        return _blocks(rules, item, block, high)
    shortest = max(low, BLOCK)
    first = _block(rules, item, shortest)
    short = rules.name(f"{item}{{{low},{shortest + BLOCK}}}")
    rest = _blocks(rules, item, block, high - shortest - BLOCK)
    return f"({short} | {first} {rest})"


def _block(rules: RuleNames, item: str, low: int) -> str:
    """Return the name of a rule of `low` to `low + BLOCK` characters; tokens must not extend beyond it.

    The compiler would add rules without the lookahead for a count in braces, and masks would take 100 ms.
    """
    rest = rules.name(f'("" | {item}) {ENDS_WITH_TOKEN}')
    for _ in range(BLOCK - 1):
        rest = rules.name(f'("" | {item} {rest}) {ENDS_WITH_TOKEN}')
    return rules.name(f"({' '.join([item] * low)} {rest}) {ENDS_WITH_TOKEN}")


def _blocks(rules: RuleNames, item: str, block: str, high: int) -> str:
    """Return an expression of at most `high` characters.

    The last rule has at least BLOCK characters: it takes over where no block may end yet.
    """
    count = max(0, high - BLOCK) // (2 * BLOCK)
    last = rules.name(f"{item}{{0,{high - 2 * BLOCK * count}}}")
    return f"({block}{{0,{count}}} {last})" if count else last
