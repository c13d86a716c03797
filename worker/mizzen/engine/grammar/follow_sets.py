"""Tells the compiler which characters may follow each rule of a grammar.

A token may go on beyond the end of the rule that it begins in. Where the compiler does not know what follows,
it has to try such tokens against all that is open whenever a mask is made: thousands of them, some
microseconds each, for a rule as plain as a word of at most twelve letters. It knows by itself only what
follows rules that are named once, in the middle of others. So the sets FOLLOW of the text-book are worked out
here, over the compiler's own form of the grammar, and given to all other rules as their lookahead. That only
sorts out tokens which no text could have there: masks stay the same.

Only sets within ASCII are given: of a longer character a token may hold a part.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any

import xgrammar

FORMAT = "v16"
"""Of the compiler's written grammars that this module reads; others are left as they are."""
MOST_PARTS = 6000
"""Larger grammars are left as they are: some 10 us a part go into it with the interpreter's lock held."""
MOST_TEXT = 1 << 17
"""Characters of a grammar that is read here at all."""
OTHER = 1 << 128
"""Bit for all characters beyond ASCII, and for what is not known; bits below stand for a character each."""
ASCII = OTHER - 1
ANYTHING = OTHER | ASCII
NOTHING = 1
"""No set may be empty; a token with a zero byte is then tried as ever."""


class Kind(enum.IntEnum):
    """What a part of a grammar is; its numbers are the compiler's."""

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
class Part:
    """One expression of a grammar."""

    kind: Kind
    data: tuple[int, ...]


class Unknown(Exception):
    """A grammar has what this module does not know."""


def followed(grammar: xgrammar.Grammar) -> str:
    """Return a grammar with lookaheads where the compiler finds none itself, as JSON that the compiler reads.

    Empty where it stays as it is.
    """
    try:
        plain = optimised(grammar)
        written = json.loads(plain.serialize_json())
        followers = Followers(written).found()
    except (Unknown, RuntimeError):  # it names tokens, or is wrong, which the compiler says
        return ""
    changed = False
    for rule, follow in zip(written["rules"], followers, strict=True):
        if rule[2] == -1 and not follow & OTHER:
            rule[2] = add(written, Kind.SEQUENCE, [add(written, Kind.CLASS, [0, *ranges(follow or NOTHING)])])
            changed = True
    return json.dumps(written) if changed else ""


def optimised(grammar: xgrammar.Grammar) -> xgrammar.Grammar:
    """Return a grammar with the rules that the compiler makes of it, repetitions written out.

    It goes through text, for the compiler's own holds automata, too: much for each rule.

    Raises:
        RuntimeError: the compiler cannot use it without a vocabulary.
        Unknown: it is another one as text, or large.
    """
    no_tokens = xgrammar.TokenizerInfo([], xgrammar.VocabType.RAW, vocab_size=0, stop_token_ids=[])
    compiler = xgrammar.GrammarCompiler(no_tokens, max_threads=1, cache_enabled=False)
    text = str(compiler.compile_grammar(grammar).grammar)
    if len(text) > MOST_TEXT:
        raise Unknown
    read = xgrammar.Grammar.from_ebnf(text)
    if str(read) != text:
        raise Unknown
    return read


def add(written: dict[str, Any], kind: Kind, data: list[int]) -> int:
    """Add a part to a written grammar; return its number."""
    parts, starts = written["grammar_expr_data"], written["grammar_expr_indptr"]
    starts.append(len(parts))
    parts += [kind, len(data), *data]
    return len(starts) - 1


def ranges(characters: int) -> list[int]:
    """Return a set as the first and the last characters of its ranges."""
    found: list[int] = []
    for character in range(128):
        if not characters >> character & 1:
            continue
        if found and found[-1] == character - 1:
            found[-1] = character
        else:
            found += [character, character]
    return found


class Followers:
    """Works out which characters may follow the rules of a written grammar."""

    def __init__(self, written: dict[str, Any]) -> None:
        """Read it.

        Raises:
            Unknown: it has what this module does not know.
        """
        data, starts = written["grammar_expr_data"], written["grammar_expr_indptr"]
        if written["__VERSION__"] != FORMAT or written["suffix_stop_infos"] or len(starts) > MOST_PARTS:
            raise Unknown
        try:
            self.parts = [
                Part(Kind(data[start]), tuple(data[start + 2 : start + 2 + data[start + 1]]))
                for start in starts
            ]
        except ValueError:
            raise Unknown from None
        self.bodies = [self.parts[rule[1]] for rule in written["rules"]]
        self.empty = [False] * len(self.bodies)
        """By rule: whether its text may be empty."""
        self.first = [0] * len(self.bodies)
        """By rule: characters that its texts begin with."""
        self.follow = [0] * len(self.bodies)
        self.ends: list[set[int]] = [set() for _ in self.bodies]
        """By rule: those that its texts may end with."""

    def found(self) -> list[int]:
        """Return the set of each rule."""
        self.find_empty()
        begins: list[set[int]] = [set() for _ in self.bodies]
        for rule, body in enumerate(self.bodies):
            named: set[int] = set()
            self.first[rule] = self.head(body, named)
            for one in named:
                begins[one].add(rule)
        spread(self.first, begins)
        for rule, body in enumerate(self.bodies):
            self.walk(body, 0, {rule})
        spread(self.follow, self.ends)
        return self.follow

    def find_empty(self) -> None:
        """Find the rules whose texts may be empty."""
        named_by: list[set[int]] = [set() for _ in self.bodies]
        for rule, body in enumerate(self.bodies):
            for one in self.named(body):
                named_by[one].add(rule)
        waiting = set(range(len(self.bodies)))
        while waiting:
            rule = waiting.pop()
            if not self.empty[rule] and self.may_be_empty(self.bodies[rule]):
                self.empty[rule] = True
                waiting |= named_by[rule]

    def named(self, part: Part) -> list[int]:
        """Return the rules within a part."""
        if part.kind in (Kind.SEQUENCE, Kind.CHOICES):
            return [rule for inner in part.data for rule in self.named(self.parts[inner])]
        return [part.data[0]] if part.kind in (Kind.RULE, Kind.REPEAT) else []

    def may_be_empty(self, part: Part) -> bool:
        """Tell whether a text of a part may be empty, as far as is known."""
        kind, data = part.kind, part.data
        if kind is Kind.SEQUENCE:
            return all(self.may_be_empty(self.parts[inner]) for inner in data)
        if kind is Kind.CHOICES:
            return any(self.may_be_empty(self.parts[inner]) for inner in data)
        if kind in (Kind.RULE, Kind.REPEAT):
            return self.empty[data[0]] or (kind is Kind.REPEAT and not data[1])
        return kind is not Kind.CLASS and not (kind is Kind.BYTES and data)

    def head(self, part: Part, named: set[int] | None = None) -> int:
        """Return what texts of a part begin with; with `named`, add rules to that instead of their sets."""
        kind, data = part.kind, part.data
        if kind is Kind.SEQUENCE:
            found = 0
            for inner in data:
                found |= self.head(self.parts[inner], named)
                if not self.may_be_empty(self.parts[inner]):
                    break
            return found
        if kind is Kind.CHOICES:
            return union(self.head(self.parts[inner], named) for inner in data)
        if kind in (Kind.RULE, Kind.REPEAT):
            if named is None:
                return self.first[data[0]]
            named.add(data[0])
            return 0
        if kind is Kind.BYTES:
            return 0 if not data else 1 << data[0] if data[0] < 128 else OTHER
        if kind in (Kind.CLASS, Kind.CLASS_STAR):
            return characters(data)
        return 0 if kind is Kind.EMPTY else ANYTHING

    def walk(self, part: Part, after: int, ending: set[int]) -> tuple[int, set[int]]:
        """Note what follows the rules within a part.

        Args:
            part: The part.
            after: Characters that follow it.
            ending: What follows these rules follows it, too.

        Returns:
            The same of what stands before the part.
        """
        kind, data = part.kind, part.data
        if kind is Kind.SEQUENCE:
            for inner in reversed(data):
                after, ending = self.walk(self.parts[inner], after, ending)
            return after, ending
        if kind is Kind.CHOICES:
            for inner in data:
                self.walk(self.parts[inner], after, ending)
        elif kind in (Kind.RULE, Kind.REPEAT):
            again = self.first[data[0]] if kind is Kind.REPEAT else 0
            self.follow[data[0]] |= after | again
            for rule in ending:
                self.ends[rule].add(data[0])
        elif kind in (Kind.TAGS, Kind.TOKEN_TAGS):
            for rule in data[1:-2:2] if kind is Kind.TAGS else data[2 : 2 + 2 * data[0] : 2]:
                self.follow[rule] |= ANYTHING
        if self.may_be_empty(part):
            return after | self.head(part), ending
        return self.head(part), set()


def spread(sets: list[int], into: list[set[int]]) -> None:
    """Add each set to those that it goes into, until nothing changes."""
    waiting = list(range(len(sets)))
    while waiting:
        source = waiting.pop()
        for target in into[source]:
            if sets[target] | sets[source] != sets[target]:
                sets[target] |= sets[source]
                waiting.append(target)


def union(sets: Any) -> int:
    """Return what is in any of some sets."""
    found = 0
    for one in sets:
        found |= one
    return found


def characters(data: tuple[int, ...]) -> int:
    """Return the set of a class: whether it is negated, then the first and the last characters of ranges."""
    found = 0
    for low, high in zip(data[1::2], data[2::2], strict=True):
        if low < 128:
            found |= (1 << min(high, 127) + 1) - (1 << low)
        if high >= 128:
            found |= OTHER
    return found if not data[0] else (ASCII & ~found) | OTHER
