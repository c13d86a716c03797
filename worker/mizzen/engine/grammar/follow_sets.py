# SPDX-License-Identifier: Apache-2.0
"""Computes FOLLOW sets of a grammar's rules, and passes them to xgrammar (the compiler) as lookaheads.

A token may extend beyond the end of the rule in which it starts. If the compiler does not know which
characters may follow the rule, it has to match such tokens against every open rule whenever it fills a
bitmask: thousands of tokens at some microseconds each, even for a rule as simple as a word of at most twelve
letters. The compiler itself finds followers only of rules that are referenced once, in the middle of another
rule. So this module computes the textbook FOLLOW sets from the compiler's serialized grammar, and adds them
to all other rules as lookaheads. Lookaheads exclude only tokens that could not match anyway, so bitmasks do
not change.

Only sets of ASCII characters are added, because a token may contain part of any other character.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any

import xgrammar

SERIAL_FORMAT = "v16"
"""Version of the serialization format that this module reads; grammars in other versions stay unchanged."""
MAX_EXPRESSIONS = 6000
"""Maximum number of expressions in a grammar; larger grammars stay unchanged.

Each expression takes about 10 us on a CPU, with the interpreter lock held."""
MAX_TEXT_CHARACTERS = 1 << 17
"""Maximum number of characters in a grammar's text; longer grammars stay unchanged."""
NON_ASCII = 1 << 128
"""Bit for all non-ASCII and all unknown characters; each lower bit stands for one ASCII character."""
ASCII = NON_ASCII - 1
ANY_CHARACTER = NON_ASCII | ASCII
ZERO_BYTE = 1
"""Set that contains only the zero byte; it replaces the empty set, which the compiler rejects.

Then a token may extend beyond the end of the rule only if its first byte after that end is zero."""


class ExpressionKind(enum.IntEnum):
    """Kinds of grammar expressions; each value is the compiler's number for the kind."""

    BYTES = 0
    CLASS = 1
    CLASS_STAR = 2
    EMPTY = 3
    RULE = 4
    SEQUENCE = 5
    CHOICES = 6
    TAGS = 7
    REPEAT = 8
    TOKEN = 9
    OTHER_TOKEN = 10
    TOKEN_TAGS = 11


@dataclass(frozen=True, slots=True)
class GrammarExpression:
    """An expression of a grammar."""

    kind: ExpressionKind
    data: tuple[int, ...]
    """Content, which depends on the kind: bytes, character ranges, or indices of rules and expressions."""


class UnsupportedGrammar(Exception):
    """A grammar is too large or has expressions that this module does not support; it stays unchanged."""


def add_lookaheads(grammar: xgrammar.Grammar) -> str:
    """Add lookaheads to the rules that have none, and return the grammar in the compiler's JSON form.

    Returns an empty string if no lookahead was added.
    """
    try:
        plain = normalize_grammar(grammar)
        serialized = json.loads(plain.serialize_json())
        followers = FollowSets(serialized).compute()
    except (UnsupportedGrammar, RuntimeError):  # if the grammar is invalid, its compilation reports it
        return ""
    changed = False
    for rule, follow in zip(serialized["rules"], followers, strict=True):
        if rule[2] == -1 and not follow & NON_ASCII:
            rule[2] = add_expression(
                serialized,
                ExpressionKind.SEQUENCE,
                [
                    add_expression(
                        serialized, ExpressionKind.CLASS, [0, *character_ranges(follow or ZERO_BYTE)]
                    )
                ],
            )
            changed = True
    return json.dumps(serialized) if changed else ""


def normalize_grammar(grammar: xgrammar.Grammar) -> xgrammar.Grammar:
    """Return a grammar with its rules as the compiler optimizes them; repetitions are expanded.

    The optimized rules are converted to text and parsed again, because the compiler's object also holds a
    large automaton for each rule.

    Raises:
        RuntimeError: The compiler cannot compile the grammar without a vocabulary.
        UnsupportedGrammar: The grammar changes in the conversion to text, or is too large.
    """
    no_tokens = xgrammar.TokenizerInfo([], xgrammar.VocabType.RAW, vocab_size=0, stop_token_ids=[])
    compiler = xgrammar.GrammarCompiler(no_tokens, max_threads=1, cache_enabled=False)
    text = str(compiler.compile_grammar(grammar).grammar)
    if len(text) > MAX_TEXT_CHARACTERS:
        raise UnsupportedGrammar
    parsed = xgrammar.Grammar.from_ebnf(text)
    if str(parsed) != text:
        raise UnsupportedGrammar
    return parsed


def add_expression(serialized: dict[str, Any], kind: ExpressionKind, data: list[int]) -> int:
    """Append an expression to a serialized grammar; return its number."""
    expressions, starts = serialized["grammar_expr_data"], serialized["grammar_expr_indptr"]
    starts.append(len(expressions))
    expressions += [kind, len(data), *data]
    return len(starts) - 1


def character_ranges(characters: int) -> list[int]:
    """Return a set of ASCII characters as ranges: the first and last character of each, in one list."""
    bounds: list[int] = []
    for character in range(128):
        if not characters >> character & 1:
            continue
        if bounds and bounds[-1] == character - 1:
            bounds[-1] = character
        else:
            bounds += [character, character]
    return bounds


class FollowSets:
    """Computes the FOLLOW sets of all rules of a serialized grammar; a set of characters is a bit mask."""

    def __init__(self, serialized: dict[str, Any]) -> None:
        """Read the rules of a serialized grammar.

        Raises:
            UnsupportedGrammar: The grammar is too large, or its format or an expression is not supported.
        """
        data, starts = serialized["grammar_expr_data"], serialized["grammar_expr_indptr"]
        if (
            serialized["__VERSION__"] != SERIAL_FORMAT
            or serialized["suffix_stop_infos"]
            or len(starts) > MAX_EXPRESSIONS
        ):
            raise UnsupportedGrammar
        try:
            self.expressions = [
                GrammarExpression(
                    ExpressionKind(data[start]), tuple(data[start + 2 : start + 2 + data[start + 1]])
                )
                for start in starts
            ]
        except ValueError:
            raise UnsupportedGrammar from None
        self.bodies = [self.expressions[rule[1]] for rule in serialized["rules"]]
        self.nullable = [False] * len(self.bodies)
        """For each rule, whether it matches the empty text."""
        self.first_sets = [0] * len(self.bodies)
        """For each rule, the characters with which its texts may begin."""
        self.follow_sets = [0] * len(self.bodies)
        """For each rule, the characters that may follow its texts."""
        self.ending_rules: list[set[int]] = [set() for _ in self.bodies]
        """For each rule, the rules with which its texts may end; they inherit its FOLLOW set."""

    def compute(self) -> list[int]:
        """Return the FOLLOW set of each rule."""
        self.find_nullable_rules()
        beginning_rules: list[set[int]] = [set() for _ in self.bodies]
        for rule, body in enumerate(self.bodies):
            starts: set[int] = set()
            self.first_sets[rule] = self.first_set(body, starts)
            for start in starts:
                beginning_rules[start].add(rule)
        propagate_sets(self.first_sets, beginning_rules)
        for rule, body in enumerate(self.bodies):
            self.add_followers(body, 0, {rule})
        propagate_sets(self.follow_sets, self.ending_rules)
        return self.follow_sets

    def find_nullable_rules(self) -> None:
        """Find the rules that match the empty text."""
        referenced_by: list[set[int]] = [set() for _ in self.bodies]
        for rule, body in enumerate(self.bodies):
            for referenced in self.referenced_rules(body):
                referenced_by[referenced].add(rule)
        waiting = set(range(len(self.bodies)))
        while waiting:
            rule = waiting.pop()
            if not self.nullable[rule] and self.is_nullable(self.bodies[rule]):
                self.nullable[rule] = True
                waiting |= referenced_by[rule]

    def referenced_rules(self, expression: GrammarExpression) -> list[int]:
        """Return the numbers of the rules that an expression references."""
        if expression.kind in (ExpressionKind.SEQUENCE, ExpressionKind.CHOICES):
            return [
                rule for inner in expression.data for rule in self.referenced_rules(self.expressions[inner])
            ]
        return [expression.data[0]] if expression.kind in (ExpressionKind.RULE, ExpressionKind.REPEAT) else []

    def is_nullable(self, expression: GrammarExpression) -> bool:
        """Return whether an expression matches the empty text, given the nullable rules found so far."""
        kind, data = expression.kind, expression.data
        if kind is ExpressionKind.SEQUENCE:
            return all(self.is_nullable(self.expressions[inner]) for inner in data)
        if kind is ExpressionKind.CHOICES:
            return any(self.is_nullable(self.expressions[inner]) for inner in data)
        if kind in (ExpressionKind.RULE, ExpressionKind.REPEAT):
            return self.nullable[data[0]] or (kind is ExpressionKind.REPEAT and not data[1])
        return kind is not ExpressionKind.CLASS and not (kind is ExpressionKind.BYTES and data)

    def first_set(self, expression: GrammarExpression, rules: set[int] | None = None) -> int:
        """Return the characters with which a text of an expression may begin.

        If `rules` is given, the rules with which a text may begin are added to it, and their own first sets
        are not included in the result.
        """
        kind, data = expression.kind, expression.data
        if kind is ExpressionKind.SEQUENCE:
            first = 0
            for inner in data:
                first |= self.first_set(self.expressions[inner], rules)
                if not self.is_nullable(self.expressions[inner]):
                    break
            return first
        if kind is ExpressionKind.CHOICES:
            return union_sets(self.first_set(self.expressions[inner], rules) for inner in data)
        if kind in (ExpressionKind.RULE, ExpressionKind.REPEAT):
            if rules is None:
                return self.first_sets[data[0]]
            rules.add(data[0])
            return 0
        if kind is ExpressionKind.BYTES:
            return 0 if not data else 1 << data[0] if data[0] < 128 else NON_ASCII
        if kind in (ExpressionKind.CLASS, ExpressionKind.CLASS_STAR):
            return character_class_set(data)
        return 0 if kind is ExpressionKind.EMPTY else ANY_CHARACTER

    def add_followers(
        self, expression: GrammarExpression, after: int, ending: set[int]
    ) -> tuple[int, set[int]]:
        """Add the followers of an expression to the FOLLOW sets of the rules that it references.

        Args:
            expression: The expression.
            after: Characters that may follow the expression.
            ending: Rules whose texts may end with the expression, so that their followers follow it too.

        Returns:
            The values of `after` and `ending` for an expression in front of this one.
        """
        kind, data = expression.kind, expression.data
        if kind is ExpressionKind.SEQUENCE:
            for inner in reversed(data):
                after, ending = self.add_followers(self.expressions[inner], after, ending)
            return after, ending
        if kind is ExpressionKind.CHOICES:
            for inner in data:
                self.add_followers(self.expressions[inner], after, ending)
        elif kind in (ExpressionKind.RULE, ExpressionKind.REPEAT):
            repeated = self.first_sets[data[0]] if kind is ExpressionKind.REPEAT else 0
            self.follow_sets[data[0]] |= after | repeated
            for rule in ending:
                self.ending_rules[rule].add(data[0])
        elif kind in (ExpressionKind.TAGS, ExpressionKind.TOKEN_TAGS):
            for rule in data[1:-2:2] if kind is ExpressionKind.TAGS else data[2 : 2 + 2 * data[0] : 2]:
                self.follow_sets[rule] |= ANY_CHARACTER
        if self.is_nullable(expression):
            return after | self.first_set(expression), ending
        return self.first_set(expression), set()


def propagate_sets(sets: list[int], into: list[set[int]]) -> None:
    """Add each set to the sets that must include it, until nothing changes.

    `into` holds, for each set, the indices of the sets that must include it.
    """
    waiting = list(range(len(sets)))
    while waiting:
        source = waiting.pop()
        for target in into[source]:
            if sets[target] | sets[source] != sets[target]:
                sets[target] |= sets[source]
                waiting.append(target)


def union_sets(sets: Any) -> int:
    """Return the union of sets of characters."""
    result = 0
    for characters in sets:
        result |= characters
    return result


def character_class_set(data: tuple[int, ...]) -> int:
    """Return the set of characters that a character class matches.

    `data` is the negation flag of the class, followed by the first and last character of each range.
    """
    members = 0
    for low, high in zip(data[1::2], data[2::2], strict=True):
        if low < 128:
            members |= (1 << min(high, 127) + 1) - (1 << low)
        if high >= 128:
            members |= NON_ASCII
    return members if not data[0] else (ASCII & ~members) | NON_ASCII
