# SPDX-License-Identifier: Apache-2.0
"""Relaxed schemas pass the engine's check, and accept every value that the original schema accepts."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import referencing.exceptions
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.engine.grammar.errors import GrammarError
from mizzen.engine.grammar.schema_support import check_schema
from mizzen.gateway.tools.relax_schema import relax_schema

TEXT = {"type": "string"}
ANCHORED = {"$anchor": "here", "type": "string"}
TREE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}, "name": TEXT}}
KEPT: list[Any] = [
    True,
    {},
    {"type": "object", "additionalProperties": True},
    {"type": "object", "properties": {"a": TEXT, "b": {"type": "integer", "minimum": 1}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"enum": ["x", None]}}, "additionalProperties": False},
    {"type": "object", "patternProperties": {"^x-[a-z]+$": TEXT}},
    {"type": "object", "properties": {"n": {"const": 1}}, "required": ["n"],
     "patternProperties": {"^x-[a-z]$": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": TEXT},
    {"type": "array", "items": {"anyOf": [TEXT, {"type": "null"}]}, "minItems": 1},
    {"type": "string", "pattern": r"^(?:\d{3}-)?[^\"a]+\.(x|y)$"},
    {"type": ["string", "null"], "maxLength": 5, "description": "d", "default": None},
    {"type": "integer", "multipleOf": 3, "minimum": 3, "maximum": 9},
    {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}},
    {"allOf": [{"type": "integer"}], "title": "t"},
    {"type": "string", "enum": ["a", "b"]},
    {"type": "string", "format": "date-time"},
]  # fmt: skip
RELAXED: list[tuple[Any, Any]] = [
    ({"type": "array", "items": TEXT, "uniqueItems": True}, {"type": "array", "items": TEXT}),
    ({"type": "string", "pattern": r"^(?!\.)a+$", "minLength": 2}, {"type": "string", "minLength": 2}),
    ({"type": "string", "format": "email", "minLength": 2}, {"type": "string", "format": "email"}),
    ({"type": "string", "pattern": r"\bx"}, TEXT),
    ({"type": "number", "multipleOf": 0.5, "minimum": 0}, {"type": "number", "minimum": 0}),
    ({"type": "integer", "exclusiveMinimum": True, "minimum": 1}, {"type": "integer", "minimum": 1}),
    ({"minLength": 2}, {}),
    ({"type": "string", "enum": ["a", None]}, {"type": "string", "enum": ["a"]}),
    ({"enum": [1, 2], "minimum": 1}, {"enum": [1, 2]}),
    ({"oneOf": [TEXT, {"maxLength": 3}]}, {"anyOf": [TEXT, {}]}),
    ({"type": "string", "anyOf": [{"maxLength": 3}, {"enum": ["long"]}]},
     {"anyOf": [{"type": "string", "maxLength": 3}, {"enum": ["long"]}]}),
    ({"type": "array", "items": [True, TEXT]}, {"type": "array", "prefixItems": [{}, TEXT]}),
    ({"type": "object", "minProperties": 1},
     {"type": "object", "minProperties": 1, "additionalProperties": True}),
    ({"$ref": "https://example.com/schema"}, {}),
    ({"$ref": "#/$defs/none"}, {}),
    ({"type": "array", "items": [TEXT, {"type": "integer"}]},
     {"type": "array", "prefixItems": [TEXT, {"type": "integer"}]}),
    ({"type": "object", "required": ["a"]},
     {"type": "object", "required": ["a"], "additionalProperties": True, "properties": {"a": True}}),
    ({"type": "object", "properties": {"a": TEXT}, "required": ["a", "b"], "additionalProperties": False},
     {"type": "object", "properties": {"a": TEXT}, "required": ["a"], "additionalProperties": False}),
    ({"type": "object", "properties": {"a": TEXT}, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
     {"type": "object", "properties": {"a": TEXT}, "additionalProperties": True}),
    ({"type": "object", "properties": {"a": TEXT}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
     {"type": "object", "properties": {"a": TEXT}, "additionalProperties": True}),
    ({"type": "object", "properties": {"xa": TEXT}, "patternProperties": {"^x": TEXT}},
     {"type": "object", "properties": {"xa": TEXT}, "additionalProperties": True}),
    # counts and bounds
    ({"type": "string", "maxLength": 3.0}, {"type": "string", "maxLength": 3}),
    ({"type": "string", "minLength": 4, "maxLength": 3}, TEXT),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, {"type": "integer", "minimum": 0}),
    ({"type": "integer", "minimum": 0.5, "exclusiveMaximum": 2.5},
     {"type": "integer", "minimum": 1, "maximum": 2}),
    ({"type": "integer", "minimum": 0.5, "maximum": 0.7}, {"type": "integer"}),
    ({"type": "number", "minimum": -1e30, "maximum": 0.5}, {"type": "number", "maximum": 0.5}),
    ({"type": "number", "exclusiveMinimum": 2, "maximum": 2}, {"type": "number"}),
    ({"type": "integer", "multipleOf": 5, "minimum": 1, "maximum": 4},
     {"type": "integer", "minimum": 1, "maximum": 4}),
    ({"type": "array", "prefixItems": [TEXT, TEXT], "maxItems": 1},
     {"type": "array", "prefixItems": [TEXT], "maxItems": 1}),
    ({"type": "array", "prefixItems": [TEXT], "items": False, "minItems": 2},
     {"type": "array", "prefixItems": [TEXT], "items": False}),
    ({"type": "object", "properties": {"a": TEXT}, "required": ["a"], "maxProperties": 0},
     {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}),
    ({"type": "array", "minItems": 2}, {"type": "array", "minItems": 2, "items": {}}),
    ({"type": "array", "maxItems": 2}, {"type": "array", "maxItems": 2, "items": {}}),
    ({"type": "array", "additionalProperties": False}, {"type": "array"}),
    # the schema `false`
    ({"type": "object", "properties": {"a": False, "b": TEXT}},
     {"type": "object", "properties": {"b": TEXT}}),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]},
     {"type": "object", "properties": {"a": True}, "required": ["a"]}),
    ({"anyOf": [False, TEXT]}, {"anyOf": [TEXT]}),
    ({"anyOf": [False]}, {}),
    ({"type": "array", "prefixItems": [False]}, {"type": "array", "prefixItems": [{}]}),
    # patterns that are no regular expressions, or not in all dialects
    ({"type": "string", "pattern": "^{[a-z]+}$"}, TEXT),
    ({"type": "string", "pattern": "a{x}"}, TEXT),
    ({"type": "string", "pattern": "(a"}, TEXT),
    ({"type": "string", "pattern": "a{3,1}"}, TEXT),
    # references
    ({"$ref": "#/components/schemas/X", "components": {"schemas": {"X": {"type": "integer", "maximum": 9}}}},
     {"$ref": "#/$defs/target1", "components": {"schemas": {"X": {"type": "integer", "maximum": 9}}},
      "$defs": {"target1": {"type": "integer", "maximum": 9}}}),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "integer"}}},
     {"$ref": "#/$defs/target1", "$defs": {"a/b": {"type": "integer"}, "target1": {"type": "integer"}}}),
    ({"anyOf": [{"$ref": "#here"}], "$defs": {"target1": {}, "x": ANCHORED}},
     {"anyOf": [{"$ref": "#/$defs/target1001"}],
      "$defs": {"target1": {}, "x": ANCHORED, "target1001": ANCHORED}}),
    ({"anyOf": [{"$ref": "#/anyOf/1"}, {**TEXT, "not": {}}]},
     {"anyOf": [{"$ref": "#/$defs/target1"}, TEXT], "$defs": {"target1": TEXT}}),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
     {"$defs": {"a": {}, "b": {}}}),
    ({"$ref": "#"}, {}),
    ({"type": "object", "properties": {"a": {"not": TEXT}}, "dependentRequired": {"a": ["b"]}},
     {"type": "object", "properties": {"a": {}}}),
    ({"type": "object", "additionalProperties": {"not": TEXT}, "minProperties": 2},
     {"type": "object", "additionalProperties": {}}),
]  # fmt: skip


@pytest.mark.parametrize("schema", KEPT, ids=json.dumps)
def test_enforceable_schemas_are_unchanged(schema: Any) -> None:
    check_schema(schema)
    assert relax_schema(schema) == schema


@pytest.mark.parametrize(("schema", "relaxed"), RELAXED, ids=json.dumps)
def test_only_unenforceable_constraints_are_dropped(schema: Any, relaxed: Any) -> None:
    before = json.dumps(schema)
    assert relax_schema(schema) == relaxed
    check_schema(relaxed)
    xgrammar.Grammar.from_json_schema(json.dumps(relaxed))
    assert json.dumps(schema) == before


names = st.sampled_from(["a", "b", "c"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.sampled_from(["", "a", "ab1", 0.5]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)
kinds = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
patterns = st.sampled_from(
    [
        "^a",
        "b$",
        "^[a-z]+$",
        "a|b",
        r"(?=a)b",
        r"\d",
        r"(a)\1",
        'a"',
        r"a\\b",
        "x^",
        "^{a}$",
        "[b-a]",
        "(a",
        r"\p{L}",
        "a{2,1}",
        "a{2}",
    ]
)
counts = st.integers(0, 3) | st.floats(0, 3).map(round).map(float)

bounds = st.integers(-3, 9) | st.sampled_from([0.5, -1.5, 2.0, 2**63, -(2**64), 1e300])


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    optional: dict[str, st.SearchStrategy[Any]] = {
        "type": kinds | st.lists(kinds, min_size=1, max_size=3, unique=True),
        **dict.fromkeys(("anyOf", "oneOf", "allOf"), several),
        "prefixItems": st.lists(inner.filter(lambda item: item is not True), min_size=1, max_size=3),
        **dict.fromkeys(("not", "if", "then", "else", "contains", "additionalProperties"), inner),
        **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), inner),
        "items": inner | several,
        **dict.fromkeys(("properties", "$defs", "definitions"), st.dictionaries(names, inner, max_size=3)),
        "patternProperties": st.dictionaries(patterns, inner, max_size=2),
        "propertyNames": st.fixed_dictionaries({}, optional={"pattern": patterns, "maxLength": counts}),
        "required": st.lists(names, max_size=3, unique=True),
        "dependentRequired": st.dictionaries(names, st.lists(names, max_size=2), max_size=2),
        "enum": st.lists(values, min_size=1, max_size=4),
        "const": values,
        "$ref": st.sampled_from(
            ["#", "#/$defs/a", "#/definitions/b", "#/properties/b", "#/anyOf/0", "#/items", "#/nothing", "#a"]
        ),
        "pattern": patterns,
        "format": st.sampled_from(["date", "uuid", "email"]),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), counts),
        **dict.fromkeys(("minProperties", "maxProperties", "minContains"), counts),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMaximum"), bounds),
        "exclusiveMinimum": bounds | st.booleans(),
        "multipleOf": st.sampled_from([1, 2, 0.5]),
        "uniqueItems": st.booleans(),
    }
    return st.fixed_dictionaries({}, optional=optional)


schemas = st.recursive(
    st.booleans() | st.fixed_dictionaries({}, optional={"type": kinds}), keywords, max_leaves=6
)


@settings(max_examples=600)
@given(schema=schemas)
def test_engine_accepts_every_relaxed_schema(schema: Any) -> None:
    relaxed = relax_schema(schema)
    if relaxed is False:
        return  # the request is rejected, because nothing matches
    check_schema(relaxed)
    xgrammar.Grammar.from_json_schema(json.dumps(relaxed))
    assert relax_schema(relaxed) == relaxed


@settings(max_examples=300)
@given(schema=schemas, value=values)
def test_all_constraints_of_an_enforceable_schema_are_kept(schema: Any, value: Any) -> None:
    relaxed = relax_schema(schema)
    try:
        check_schema(schema)
        xgrammar.Grammar.from_json_schema(json.dumps(schema))
        expected = jsonschema.Draft202012Validator(schema).is_valid(value)
        found = jsonschema.Draft202012Validator(relaxed).is_valid(value)
    except (GrammarError, RuntimeError, re.error, referencing.exceptions.Unresolvable):
        return
    assert expected or not found


@settings(max_examples=400)
@given(schema=schemas.filter(lambda item: "$ref" not in json.dumps(item)), value=values)
def test_every_valid_value_stays_valid(schema: Any, value: Any) -> None:
    """Here, a value is valid if the rules of JSON Schema accept it.

    Engines are stricter: they forbid additional properties unless a schema allows them.
    """
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError:
        return
    if jsonschema.Draft202012Validator(schema).is_valid(value):
        assert jsonschema.Draft202012Validator(relax_schema(schema)).is_valid(value)
