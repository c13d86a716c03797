# SPDX-License-Identifier: Apache-2.0
"""Texts of random grammars conform to their schemas and patterns, plain and in structural tags."""

from __future__ import annotations

import random

import pytest
import schema_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.common.json_schema import Schema
from mizzen.core.sampling_params import Grammar, GrammarKind
from mizzen.engine.grammar.errors import GrammarError
from mizzen.engine.grammar.xgrammar_backend import GrammarBuilder
from mizzen.gateway.tools.relax_schema import relax_schema

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def builder() -> GrammarBuilder:
    return oracle.OracleBuilder()


def check_schema_of_seed(builder: GrammarBuilder, seed: int, rounds: int = 3) -> int:
    """Check texts of a random schema and of its relaxed form; return the number of checked texts."""
    rng, checked = random.Random(seed), 0
    schema = oracle.random_schema(rng)
    for wanted in (schema, relax_schema(schema)):
        for whitespace in (None, 0, 1):
            grammar = oracle.schema_grammar(wanted, whitespace)
            try:
                checked += oracle.check_texts(builder, grammar, wanted, rng, rounds)
            except (GrammarError, RecursionError):
                # jsonschema does not end if a schema refers to itself without a value between
                continue
    return checked


def check_pattern_of_seed(builder: GrammarBuilder, seed: int, rounds: int = 3) -> int:
    """Check texts of a random pattern; return the number of checked texts."""
    rng, checked = random.Random(seed), 0
    pattern = oracle.random_pattern(rng)
    tag = oracle.tag_grammar({"type": "regex", "pattern": pattern})
    for grammar in (Grammar(GrammarKind.REGEX, pattern), tag):
        try:
            checked += oracle.check_matches(builder, grammar, pattern, rng, rounds)
        except GrammarError:
            continue
    return checked


CASES: list[tuple[Schema, str, bool]] = [
    ({"type": "string", "pattern": r"^[0-9]{2}(\.[0-9]{1,4})?$"}, '"12.3456"', True),
    ({"type": "string", "pattern": r"^[0-9]{2}(\.[0-9]{1,4})?$"}, '"12."', False),
    ({"type": "string", "pattern": "^.{1,255}$"}, '"' + "a" * 255 + '"', True),
    ({"type": "string", "pattern": "^.{1,255}$"}, '"' + "a" * 256 + '"', False),
    ({"type": "string", "pattern": "^.{1,255}$"}, '"a\\"', False),
    ({"type": "string", "pattern": "^.{1,255}$"}, '"a"b"', False),
    ({"type": "string", "pattern": r"^[\s\S]{129}$"}, '"' + "é" * 129 + '"', True),
    ({"type": ["string", "null"], "maxLength": 200}, '"a\nb"', False),
    ({"type": "string", "maxLength": 2000}, '"' + "é" * 2000 + '"', True),
    ({"type": "string", "maxLength": 2000}, '"' + "é" * 2001 + '"', False),
    ({"type": "string", "maxLength": 2**31 - 1}, '"a"', True),
    ({"type": "string", "maxLength": 10**30}, '"a"', True),
    ({"type": "string", "minLength": 90, "maxLength": 300}, '"' + "é" * 90 + '"', True),
    ({"type": "string", "minLength": 90, "maxLength": 300}, '"' + "é" * 89 + '"', False),
    ({"type": "string", "pattern": r"^\S+$"}, '"aé"', True),
    ({"type": "string", "pattern": r"^\S+$"}, '"a\u00a0"', False),
    ({"type": "string", "pattern": r"^\S+$"}, '"a\u2028"', False),
    ({"type": "string", "pattern": r"^\S+$"}, '"a\ufeff"', False),
    ({"type": "string", "pattern": "^a$|^b$"}, '"b"', True),
    ({"enum": [0.1, 0.7]}, "0.1", True),
    ({"enum": [0.1, 0.7]}, "0.10000000000000001", False),
    ({"const": 2**64 - 1}, "18446744073709551615", True),
    ({"const": 2**64 - 1}, "1.8446744073709552e+19", False),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}}, "null", True),
    ({"type": "object", "propertyNames": {"minLength": 0}}, '{"a":1}', True),
    ({"type": "object", "propertyNames": {"minLength": 0}}, "{1:1}", False),
    ({"properties": {"ab": {"const": 1}}, "additionalProperties": True}, r'{"\u0061b":2}', False),
    ({"properties": {r"\a": {"const": 1}}, "additionalProperties": True}, r'{"\\a":1,"a":2}', True),
    ({"properties": {r"\a": {"const": 1}}, "additionalProperties": True}, r'{"\b":2}', False),
    ({"properties": {'"a': {"const": 1}}, "additionalProperties": True}, '{""b":2}', False),
    ({"properties": {"\na": {"const": 1}}, "additionalProperties": True}, '{"\nb":2}', False),
    ({"properties": {"\x01a": {"const": 1}}, "additionalProperties": True}, '{"\x01b":2}', False),
    ({"properties": {"éa": {"const": 1}}, "additionalProperties": True}, '{"éb":2}', True),
    ({"properties": {"éa": {"const": 1}}, "additionalProperties": True}, '{"éa":2}', False),
    ({"properties": {"ab": {"const": 1}, "a": {}}, "additionalProperties": {}}, '{"b":2,"abc":3}', True),
    ({"properties": {"ab": {"const": 1}, "a": {}}, "additionalProperties": {}}, '{"ab":2}', False),
]


def shorten(value: object) -> str:
    """Return the beginning of a parameter, as a part of a test's name."""
    return str(value)[:60]


@pytest.mark.parametrize("whitespace", [None, 0, 1], ids=["plain", "compact tag", "tag"])
@pytest.mark.parametrize(("schema", "text", "allowed"), CASES, ids=shorten)
def test_a_text_is_allowed_only_if_it_conforms(
    builder: GrammarBuilder, schema: Schema, text: str, allowed: bool, whitespace: int | None
) -> None:
    grammar = oracle.schema_grammar(schema, whitespace)
    shown = text if whitespace is None else f"<{text}>"
    assert oracle.allows(builder, grammar, shown) is allowed


@pytest.mark.parametrize("tagged", [False, True])
def test_a_dot_matches_no_line_end(builder: GrammarBuilder, tagged: bool) -> None:
    pattern = {"type": "regex", "pattern": "a.b"}
    grammar = oracle.tag_grammar(pattern) if tagged else Grammar(GrammarKind.REGEX, "a.b")
    for text, allowed in (("aéb", True), ("a\nb", False), ("a\rb", False)):
        assert oracle.allows(builder, grammar, f"<{text}>" if tagged else text) is allowed


def test_long_strings_have_few_states(builder: GrammarBuilder) -> None:
    size = {
        length: builder.compile(
            oracle.schema_grammar({"type": "string", "maxLength": length})
        ).memory_size_bytes
        for length in (100, 2000)
    }
    assert size[2000] < 2 * size[100]


def test_references_may_follow_one_another_hundreds_of_times(builder: GrammarBuilder) -> None:
    chain = {
        f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]} for i in range(500)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**chain, "d500": {"const": 7}}}
    assert oracle.allows(builder, oracle.schema_grammar(schema), '{"a":' * 500 + "7" + "}" * 500)


def test_texts_of_most_random_schemas_are_checked(builder: GrammarBuilder) -> None:
    assert sum(check_schema_of_seed(builder, seed, rounds=1) > 0 for seed in range(10)) >= 5


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS)
def test_texts_of_random_schemas_conform(builder: GrammarBuilder, seed: int) -> None:
    check_schema_of_seed(builder, seed)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS)
def test_texts_of_random_patterns_match(builder: GrammarBuilder, seed: int) -> None:
    check_pattern_of_seed(builder, seed)
