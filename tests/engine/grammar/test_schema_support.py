# SPDX-License-Identifier: Apache-2.0
"""A JSON Schema is either enforced completely or rejected with an error that names the keyword.

The package jsonschema validates texts that are sampled from the grammar of a schema.
"""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
import xgrammar

from mizzen.core.sampling_params import Grammar, GrammarKind
from mizzen.engine.grammar.errors import GrammarError
from mizzen.engine.grammar.regex_rules import check_pattern
from mizzen.engine.grammar.xgrammar_backend import GrammarBuilder, GrammarTarget

VOCABULARY, EOS = 258, 257
ROUNDS = 25
LIKELY = {34: 8.0, 125: 8.0, 93: 8.0, EOS: 8.0}

ENFORCED: list[Any] = [
    True,
    {},
    {"type": "string"},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "maxLength": 6},
    {"type": "string", "minLength": 3},
    {"type": "string", "pattern": r"^\d{3}-[a-z]+$"},
    {"type": "string", "pattern": r"^[^a]{2}\s\S\W?.$"},
    {"type": "string", "pattern": "a+b"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "date-time"},
    {"type": "integer"},
    {"type": "integer", "minimum": -5, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": 5},
    {"type": "integer", "maximum": -3},
    {"type": "integer", "multipleOf": 3},
    {"type": "integer", "multipleOf": 3, "minimum": 4, "maximum": 50},
    {"type": "number", "minimum": 1.5, "maximum": 3},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": ["string", "null"], "maxLength": 2},
    {"type": ["integer", "string"], "minimum": 3, "minLength": 2},
    {"type": "boolean"},
    {"type": ["null", "boolean", "array", "object"]},
    {"enum": [1, "a\n", None, {"x": [1, 2]}]},
    {"type": "string", "enum": ["a", "b"]},
    {"const": {"a": [1, 2, '"quoted"']}},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
    {"type": "array", "items": {}, "maxItems": 2},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 1},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "string"}, "maxItems": 3},
    {"items": {"type": "boolean"}, "minItems": 2},
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]},
    {"properties": {'a"\n': {"const": "\u0001"}}, "required": ['a"\n']},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "maxProperties": 1},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "minProperties": 2},
    {"type": "object", "properties": {"b": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^[ab]$": {"type": "integer"}}},
    {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": {"type": "integer"}},
    {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}], "title": "t", "default": None},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
    {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "x"}}, "required": ["k"]},
            {"$ref": "#/$defs/y"},
        ],
        "$defs": {"y": {"type": "object", "properties": {"k": {"enum": ["y"]}}, "required": ["k"]}},
    },
    {"allOf": [{"type": "integer", "minimum": 3}], "description": "d"},
    {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"properties": {"v": {"type": "null"}, "n": {"$ref": "#/$defs/n"}}}},
    },
    {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
]

REFUSED: list[tuple[Any, str]] = [
    ({"not": {"type": "string"}}, '"not" at /'),
    ({"if": {}, "then": {}}, '"if" at /'),
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, '"uniqueItems" at /properties/a'),
    ({"type": "array", "contains": {}}, '"contains" at /'),
    ({"type": "object", "dependentRequired": {}}, '"dependentRequired"'),
    ({"type": "number", "multipleOf": 3}, '"multipleOf"'),
    ({"type": "integer", "multipleOf": 7, "minimum": -50}, '"multipleOf"'),
    ({"type": "integer", "exclusiveMinimum": True}, '"exclusiveMinimum"'),
    ({"type": "string", "pattern": "a", "minLength": 3}, '"minLength" at /'),
    ({"type": "string", "format": "date", "maxLength": 3}, '"maxLength" at /'),
    ({"type": "string", "pattern": 'a"b'}, '"pattern"'),
    ({"type": "string", "pattern": r"a\\b"}, '"pattern"'),
    ({"type": "string", "pattern": "x^a"}, '"pattern"'),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "string", "pattern": r"^[\p{L} ]+$"}, r"may not have \p"),
    (
        {"properties": {"v": {"$ref": "#name"}}, "$defs": {"x": {"$anchor": "name"}}},
        '"$ref" at /properties/v',
    ),
    ({"type": "string", "maxLength": -1}, '"maxLength" at /'),
    ({"properties": {"v": {"$ref": 5}}}, '"$ref" at /properties/v'),
    ({"items": {"type": []}}, '"type" at /items'),
    ({"type": "integer", "maximum": 2**64}, "below 2^63"),
    ({"type": "string", "pattern": r"(a)\1"}, r"may not have \1"),
    ({"minLength": 2}, '"minLength" at /'),
    ({"required": ["a"]}, '"required" at /'),
    ({"type": "object", "required": ["a"]}, "names 'a'"),
    ({"type": "object", "properties": {"ab": {}}, "propertyNames": {"maxLength": 1}}, '"propertyNames"'),
    (
        {"type": "object", "properties": {"ab": {}}, "patternProperties": {"^a": {}}},
        "covers the property 'ab'",
    ),
    ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, '"patternProperties"'),
    ({"type": "object", "patternProperties": {"a": {}}, "minProperties": 2}, '"minProperties"'),
    ({"type": "object", "patternProperties": {"a": {}}, "minProperties": 2.0}, '"minProperties"'),
    ({"type": "object", "patternProperties": {"(": {}}}, "parenthesis"),
    ({"allOf": [{"type": "string"}, {"minLength": 2}]}, '"allOf"'),
    ({"allOf": [{"type": "integer"}], "minimum": 3}, '"minimum" at /'),
    ({"anyOf": [{"type": "string"}], "type": "string"}, '"type" at /'),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, '"oneOf"'),
    ({"oneOf": [{"type": "object", "required": 5}, {"type": "object"}]}, '"required" at /oneOf/0'),
    ({"oneOf": [{"type": "object"}, {"type": "object", "required": [{}]}]}, '"required" at /oneOf/1'),
    ({"oneOf": [{"type": [{}]}, {"type": "string"}]}, '"type" at /oneOf/0'),
    ({"oneOf": [{"type": "string"}, {"type": {}}]}, '"type" at /oneOf/1'),
    ({"oneOf": [{"properties": [1], "required": ["a"]}, {"type": "object"}]}, '"properties" at /oneOf/0'),
    ({"oneOf": [{"type": None}, {"type": "string"}]}, '"type" at /oneOf/0'),
    ({"oneOf": [{"type": "string"}, {"properties": None}]}, '"properties" at /oneOf/1'),
    ({"oneOf": [{"type": "string", "properties": None}, {"type": "string"}]}, '"properties" at /oneOf/0'),
    ({"type": None}, '"type" at /'),
    ({"patternProperties": None, "type": "object"}, '"patternProperties" at /'),
    ({"$ref": "#/$defs/s", "maxLength": 3, "$defs": {"s": {}}}, '"maxLength"'),
    ({"$ref": "https://example.org/schema"}, '"$ref"'),
    ({"$ref": "#/nothing"}, "nothing"),
    ({"type": "string", "enum": ["a", 1]}, "holds 1"),
    ({"const": 5, "minimum": 6}, '"minimum"'),
    ({"enum": []}, "enum"),
    ({"type": "thing"}, "'thing'"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum greater than maximum"),
    ({"properties": {"a": 5}}, "/properties/a must be an object"),
    (False, "cannot accept any value"),
    ([], "must be an object"),
]


@pytest.fixture(scope="module")
def builder() -> GrammarBuilder:
    class Bytes(GrammarBuilder):
        """A grammar builder whose tokens are the single bytes of ASCII and of é.

        Other letters are left out, because validators disagree about them.
        """

        def __init__(self) -> None:
            self._target = GrammarTarget(folder="", vocab_size=VOCABULARY, end_token_ids=(EOS,))
            self._nesting = 64
            tokens = [bytes([byte]) if byte < 128 or byte in (0xC3, 0xA9) else b"" for byte in range(256)]
            tokens += [b"\xff<pad>", b"\xff<eos>"]
            self._compiler = self._make_compiler(tokens, 1)

    return Bytes()


def sample(compiled: xgrammar.CompiledGrammar, rng: random.Random, most: int = 300) -> str | None:
    """Sample a text of a grammar, byte by byte.

    Return None if the text does not end within `most` bytes.
    """
    matcher = xgrammar.GrammarMatcher(compiled)
    bits = np.empty((1, -(-VOCABULARY // 32)), np.int32)
    sampled = bytearray()
    for step in range(most):
        matcher.fill_next_token_bitmask(bits)
        allowed = (
            np.unpackbits(bits.view(np.uint8), bitorder="little", count=VOCABULARY).nonzero()[0].tolist()
        )
        assert allowed, f"nothing may follow {bytes(sampled)!r}"
        weights = [LIKELY.get(token, 1.0 if 48 <= token < 123 and step % 2 else 0.3) for token in allowed]
        (token,) = rng.choices(allowed, weights)
        assert matcher.accept_token(token)
        if token == EOS:
            return sampled.decode()
        sampled.append(token)
    return None


@cache
def validator(text: str) -> jsonschema.protocols.Validator:
    return jsonschema.Draft202012Validator(json.loads(text))


@pytest.mark.parametrize("schema", ENFORCED, ids=lambda schema: json.dumps(schema)[:60])
def test_accepted_schemas_are_enforced(schema: Any, builder: GrammarBuilder) -> None:
    text = json.dumps(schema)
    compiled = builder.compile(Grammar(GrammarKind.JSON_SCHEMA, text))
    rng = random.Random(text)
    results = [results for results in (sample(compiled, rng) for _ in range(ROUNDS)) if results is not None]
    assert results
    for sampled in results:
        validator(text).validate(json.loads(sampled))


@pytest.mark.parametrize(("schema", "keyword"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_unenforced_keywords_are_rejected_by_name(schema: Any, keyword: str, builder: GrammarBuilder) -> None:
    with pytest.raises(GrammarError) as refusal:
        builder.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    assert keyword in str(refusal.value)


def test_json_objects_have_no_whitespace(builder: GrammarBuilder) -> None:
    compiled = builder.compile(Grammar(GrammarKind.JSON_OBJECT))
    rng = random.Random(1)
    for _ in range(60):
        text = sample(compiled, rng)
        if text is not None:
            assert isinstance(json.loads(text), dict)
            assert not re.search(r'[]}"0-9el](, | :|: )', re.sub(r'"([^"\\]|\\.)*"', '""', text))


@pytest.mark.parametrize(
    "pattern",
    [
        "a.c",
        r"[\s\S]{2}",
        "^a|b$",
        r"\.\w+\d",
        "x{2,}",
        "(?:ab)+c?",
        r"[^a]b",
        r"[\]\\]",
        r"\x41\u0042",
        "é+",
    ],
)
def test_regular_expressions_match_whole_texts(pattern: str, builder: GrammarBuilder) -> None:
    compiled = builder.compile(Grammar(GrammarKind.REGEX, pattern))
    rng = random.Random(2)
    results = [
        results for results in (sample(compiled, rng, 60) for _ in range(ROUNDS)) if results is not None
    ]
    assert results
    for text in results:
        assert re.fullmatch(pattern.removeprefix("^").removesuffix("$"), text, re.ASCII)


@pytest.mark.parametrize("pattern", ["a^", "a$b", "(a$|b)c"])
def test_anchors_inside_a_pattern_are_rejected(pattern: str) -> None:
    with pytest.raises(GrammarError, match="only at its"):
        check_pattern(pattern, quoted=False)
    check_pattern("^[$^]+\\$\\^$", quoted=False)


def test_structural_tags_bound_strings_without_control_characters(builder: GrammarBuilder) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}}, "required": ["a"]}
    tag = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
    text = json.dumps(
        {"type": "structural_tag", "format": {"type": "tag", "begin": "<", "content": tag, "end": ">"}}
    )
    compiled = builder.compile(Grammar(GrammarKind.STRUCTURAL_TAG, text))
    rng = random.Random(3)
    results = [results for results in (sample(compiled, rng) for _ in range(ROUNDS)) if results is not None]
    assert results
    for sampled in results:
        jsonschema.validate(json.loads(sampled.removeprefix("<").removesuffix(">")), schema)
