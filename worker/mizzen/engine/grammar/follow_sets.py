"""Computes FOLLOW sets of a grammar's rules and passes them to the compiler as lookaheads.

A token may extend beyond the end of the rule in which it starts. If the compiler does not know what follows,
it has to try such tokens against every open rule whenever it fills a mask: thousands of tokens at some
microseconds each, for a rule as plain as a word of at most twelve letters. By itself it knows only the
followers of rules that are referenced once, in the middle of others. So the textbook FOLLOW sets are computed
here, over the compiler's own form of the grammar, and given to all other rules as lookaheads. They only rule
out tokens that no text could have at that point: masks stay the same.

Only ASCII sets are given, because a token may hold part of a longer character.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any

import xgrammar

SERIAL_FORMAT = "v16"
"""Format version of the compiler's serialized grammars that this module reads; others are left unchanged."""
MAX_EXPRESSIONS = 6000
"""Larger grammars are left unchanged: each expression takes about 10 us with the interpreter lock held."""
MAX_TEXT_CHARACTERS = 1 << 17
"""Longer grammar texts are left unchanged."""
NON_ASCII = 1 << 128
"""Bit for all characters beyond ASCII and for unknown ones; each lower bit stands for one character."""
ASCII = NON_ASCII - 1
ANY_CHARACTER = NON_ASCII | ASCII
ZERO_BYTE = 1
"""Stands for an empty set, which the compiler rejects; tokens with a zero byte are tried as before."""


class ExpressionKind(enum.IntEnum):
    """Kinds of grammar expressions; the numbers are the compiler's."""

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
    """One expression of a grammar."""

    kind: ExpressionKind
    data: tuple[int, ...]


class UnsupportedGrammar(Exception):
    """A grammar has expressions that this module does not know."""


def add_lookaheads(grammar: xgrammar.Grammar) -> str:
    """Return the grammar as the compiler's JSON, with lookaheads where the compiler finds none itself.

    Empty if the grammar stays unchanged.
    """
    try:
        plain = normalize_grammar(grammar)
        serialized = json.loads(plain.serialize_json())
        followers = FollowSets(serialized).compute()
    except (UnsupportedGrammar, RuntimeError):  # it names tokens, or is invalid, which the compiler reports
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
    """Return the grammar with the compiler's optimized rules, repetitions expanded.

    It goes through text, because the compiler's own object also holds automata, which are large for each
    rule.

    Raises:
        RuntimeError: The compiler cannot use it without a vocabulary.
        UnsupportedGrammar: It differs after the round trip through text, or is too large.
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
    """Return a set as the first and last characters of its ranges."""
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
    """Computes FOLLOW sets of the rules of a serialized grammar."""

    def __init__(self, serialized: dict[str, Any]) -> None:
        """Read a serialized grammar.

        Raises:
            UnsupportedGrammar: It has expressions that this module does not know.
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
        """Whether each rule's text may be empty."""
        self.first_sets = [0] * len(self.bodies)
        """Characters that each rule's texts begin with."""
        self.follow_sets = [0] * len(self.bodies)
        """Characters that may follow each rule."""
        self.ending_rules: list[set[int]] = [set() for _ in self.bodies]
        """Rules that each rule's texts may end with."""

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
        """Find the rules whose texts may be empty."""
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
        """Return the rules referenced in an expression."""
        if expression.kind in (ExpressionKind.SEQUENCE, ExpressionKind.CHOICES):
            return [
                rule for inner in expression.data for rule in self.referenced_rules(self.expressions[inner])
            ]
        return [expression.data[0]] if expression.kind in (ExpressionKind.RULE, ExpressionKind.REPEAT) else []

    def is_nullable(self, expression: GrammarExpression) -> bool:
        """Return whether a text of an expression may be empty, as far as is known."""
        kind, data = expression.kind, expression.data
        if kind is ExpressionKind.SEQUENCE:
            return all(self.is_nullable(self.expressions[inner]) for inner in data)
        if kind is ExpressionKind.CHOICES:
            return any(self.is_nullable(self.expressions[inner]) for inner in data)
        if kind in (ExpressionKind.RULE, ExpressionKind.REPEAT):
            return self.nullable[data[0]] or (kind is ExpressionKind.REPEAT and not data[1])
        return kind is not ExpressionKind.CLASS and not (kind is ExpressionKind.BYTES and data)

    def first_set(self, expression: GrammarExpression, rules: set[int] | None = None) -> int:
        """Return the characters that begin an expression's texts.

        With `named`, add referenced rules to it instead of including their sets.
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
        """Add the followers of the rules within an expression.

        Args:
            expression: The expression.
            after: Characters that follow it.
            ending: Rules whose followers also follow it.

        Returns:
            The same two values for whatever precedes the expression.
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
    """Add each set to the sets that include it, until nothing changes."""
    waiting = list(range(len(sets)))
    while waiting:
        source = waiting.pop()
        for target in into[source]:
            if sets[target] | sets[source] != sets[target]:
                sets[target] |= sets[source]
                waiting.append(target)


def union_sets(sets: Any) -> int:
    """Return the union of sets."""
    result = 0
    for characters in sets:
        result |= characters
    return result


def character_class_set(data: tuple[int, ...]) -> int:
    """Return the set of a class expression: its negation flag, then the bounds of its ranges."""
    members = 0
    for low, high in zip(data[1::2], data[2::2], strict=True):
        if low < 128:
            members |= (1 << min(high, 127) + 1) - (1 << low)
        if high >= 128:
            members |= NON_ASCII
    return members if not data[0] else (ASCII & ~members) | NON_ASCII
