# SPDX-License-Identifier: Apache-2.0
"""Lookaheads passed to the grammar compiler leave all masks unchanged and reduce the compiler's work."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.engine.grammar import follow_sets
from mizzen.engine.grammar.follow_sets import (
    FollowSets,
    UnsupportedGrammar,
    add_lookaheads,
    normalize_grammar,
)

END = 0
TOKENS = [b"", *(bytes([byte]) for byte in range(256))]
TOKENS += [
    a + b for a in (b"a", b"b", b"ab", b",", b" ", b'"', "é".encode()) for b in (b"a", b"b", b",", b'"')
]
TOKENS += [
    b"abab",
    b"bbbb",
    b"aaab",
    b"a,b",
    b'"a"',
    b"ab,ab",
    b"\xc3",
    b"a\xc3",
    b"\xa9b",
    b"\x00",
    b"a\x00",
]
COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo(TOKENS, xgrammar.VocabType.RAW, vocab_size=len(TOKENS), stop_token_ids=[END]),
    max_threads=1,
    cache_enabled=False,
)
RECORDS = """
root ::= "{" name ("," name){0,3} "}"
name ::= [a-b] [a-b]{1,4} (" " [a-b]{1,4})?
"""
NAMES = ("one", "two", "three")
ATOMS = ('"a"', '"b"', '"ab"', '","', "[ab]", "[^a]", "[a-z]{1,3}", '"é"', "[^,]{0,2}", '""')


def with_followers(grammar: xgrammar.Grammar) -> xgrammar.Grammar:
    return xgrammar.Grammar.deserialize_json(add_lookaheads(grammar) or grammar.serialize_json())


def bodies(later: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Generate bodies of a rule; a body may begin with a rule in `later`, and use any rule after a letter.

    Rules are never left-recursive, because left-recursive rules crash the compiler.
    """
    named = (*later, *(f'"b" {name}' for name in NAMES))
    parts = st.lists(st.sampled_from((*ATOMS, *named)), min_size=1, max_size=3).map(" ".join)
    signs = st.sampled_from(("", "*", "?", "{1,3}", "+"))
    repeated = st.tuples(parts, signs).map(lambda two: f"({two[0]}){two[1]}")
    return st.lists(repeated | parts, min_size=1, max_size=3).map(" | ".join)


BODIES = st.tuples(*(bodies(NAMES[place:]) for place in range(4)))


def mask(matcher: Any) -> list[int]:
    bits = np.zeros((1, -(-len(TOKENS) // 32)), np.int32)
    matcher.fill_next_token_bitmask(bits)
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little", count=len(TOKENS))).tolist()


def check_same_masks(grammar: xgrammar.Grammar, seed: int, steps: int = 30) -> None:
    """Walk a grammar with and without lookaheads, and compare all masks."""
    rng = np.random.default_rng(seed)
    plain = xgrammar.GrammarMatcher(COMPILER.compile_grammar(grammar))
    subject = xgrammar.GrammarMatcher(COMPILER.compile_grammar(with_followers(grammar)))
    for _ in range(steps):
        allowed = mask(plain)
        assert mask(subject) == allowed
        continuing = [token for token in allowed if token != END]
        if not continuing:
            return
        token = int(rng.choice(continuing))
        assert plain.accept_token(token)
        assert subject.accept_token(token)


@settings(max_examples=100)
@given(BODIES, st.integers(0, 2**32))
def test_lookaheads_change_no_mask_of_any_grammar(bodies_of_rules: tuple[str, ...], seed: int) -> None:
    rules = [f"{name} ::= {body}" for name, body in zip(("root", *NAMES), bodies_of_rules, strict=True)]
    try:
        grammar = xgrammar.Grammar.from_ebnf("\n".join(rules))
        COMPILER.compile_grammar(grammar)
    except RuntimeError:  # rules with infinite recursion
        return
    check_same_masks(grammar, seed)


@pytest.mark.parametrize("seed", range(5))
def test_lookaheads_change_no_mask_of_tags_regexes_and_schemas(seed: int) -> None:
    schema = {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "number"}}}}
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    tags = {"type": "triggered_tags", "triggers": ["<a>"], "tags": [tag]}
    check_same_masks(xgrammar.Grammar.from_regex(r"(a|ab|abc){1,3}(b{2,7}y?)+[^z]*z"), seed)
    check_same_masks(xgrammar.Grammar.from_json_schema(json.dumps(schema)), seed)
    check_same_masks(
        xgrammar.Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": tags})), seed
    )


def test_follow_sets_reduce_the_tokens_tried_per_mask() -> None:
    plain, helped = (
        COMPILER.compile_grammar(grammar)
        for grammar in (RECORDS, with_followers(xgrammar.Grammar.from_ebnf(RECORDS)))
    )
    without = [rule for rule in str(plain.grammar).split("\n") if rule and "(=" not in rule]
    assert len(without) > 3
    rules_without_followers = [
        rule.split()[0] for rule in str(helped.grammar).split("\n") if rule and "(=" not in rule
    ]
    assert rules_without_followers == ["root"] or set(rules_without_followers) <= {"root"}
    assert "(=([ ,}]))" in str(helped.grammar)


def test_the_compilers_serialization_format_is_supported() -> None:
    written = json.loads(normalize_grammar(xgrammar.Grammar.from_ebnf(RECORDS)).serialize_json())
    assert written["__VERSION__"] == follow_sets.SERIAL_FORMAT
    FollowSets(written).compute()
    with pytest.raises(UnsupportedGrammar):
        FollowSets(written | {"__VERSION__": "v1"})
    with pytest.raises(UnsupportedGrammar):
        FollowSets(written | {"grammar_expr_data": [99, 0], "grammar_expr_indptr": [0]})


def test_unsupported_grammars_are_left_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = xgrammar.Grammar.from_ebnf(RECORDS)
    for name, value in (("SERIAL_FORMAT", "v1"), ("MAX_EXPRESSIONS", 5), ("MAX_TEXT_CHARACTERS", 5)):
        with monkeypatch.context() as patched:
            patched.setattr(follow_sets, name, value)
            assert add_lookaheads(grammar) == ""


def test_the_serialized_size_grows_linearly_with_the_grammar() -> None:
    texts = [
        "\n".join(
            [
                f"root ::= {' '.join(f'r{i}' for i in range(n))}",
                *(f'r{i} ::= "a{i}" | [b-d]{{2}} "x"' for i in range(n)),
            ]
        )
        for n in (20, 200)
    ]
    few, many = (len(normalize_grammar(xgrammar.Grammar.from_ebnf(text)).serialize_json()) for text in texts)
    assert many < 15 * few
