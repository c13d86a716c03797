# SPDX-License-Identifier: Apache-2.0
"""Convert output constraints to grammars: OpenAI's `response_format`, and the fields of vLLM and SGLang.

The request parser calls `request_grammar`; the engine checks the grammars further when it compiles them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from mizzen.common.schema_check import find_schema_fault
from mizzen.common.schema_check import is_too_deep as is_too_deep
from mizzen.core.sampling_params import Grammar, GrammarKind, choice_grammar
from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.openai.format_schemas import JsonSchema, ResponseFormat, Schema, StructuredOutputs
from mizzen.gateway.openai.schemas import CommonFields
from mizzen.gateway.tools.relax_schema import relax_schema

MAX_GRAMMAR_CHARACTERS = 512 * 1024
MAX_ALTERNATIVES = 4096


def request_grammar(request: CommonFields) -> tuple[str, Grammar] | None:
    """Return the name and the grammar of the field that constrains a request's output; None if no field does.

    Raises:
        ApiError: 400 if several fields constrain the output, or a constraint is malformed, empty or too long.
    """
    constraints = [*iter_constraints(request)]
    if len(constraints) > 1:
        first, second = constraints[0][0], constraints[1][0]
        raise invalid(f"{first} and {second} both constrain the answer; set only one of them", second)
    if not constraints:
        return None
    name, grammar = constraints[0]
    if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
        raise invalid(f"{name} is longer than {MAX_GRAMMAR_CHARACTERS} characters", name, "grammar_too_large")
    if not grammar.text and grammar.kind != GrammarKind.JSON_OBJECT:
        raise invalid(f"{name} is empty", name)
    return name, grammar


def iter_constraints(request: CommonFields) -> Iterator[tuple[str, Grammar]]:
    """Yield the name and the grammar of each field that constrains a request's output."""
    format_constraint = response_format_constraint(request.response_format)
    if format_constraint is not None:
        yield format_constraint
    for name in ("guided_json", "json_schema"):
        if (value := getattr(request, name)) is not None:
            yield name, schema_grammar(value, name)
    for name in ("guided_regex", "regex"):
        if (value := getattr(request, name)) is not None:
            yield name, Grammar(GrammarKind.REGEX, value)
    for name in ("guided_grammar", "ebnf"):
        if (value := getattr(request, name)) is not None:
            yield name, Grammar(GrammarKind.EBNF, value)
    if request.guided_choice is not None:
        yield "guided_choice", alternatives_grammar(request.guided_choice, "guided_choice")
    if request.structured_outputs is not None:
        yield from structured_outputs_constraints(request.structured_outputs)


def response_format_constraint(response_format: ResponseFormat | None) -> tuple[str, Grammar] | None:
    """Return the field name and grammar of a `response_format`; None for type `text`.

    Raises:
        ApiError: 400 if the field that the type needs is missing or invalid, or a field of another type is
            set.
    """
    if response_format is None:
        return None
    fields = {
        "json_schema": ("json_schema",),
        "json_object": ("schema",),
        "structural_tag": ("structures", "triggers", "format"),
    }
    own_fields = fields.get(response_format.type, (response_format.type,))
    for field in msgspec.structs.fields(response_format):
        if field.name not in ("type", *own_fields) and getattr(response_format, field.name) is not None:
            name = f"response_format.{field.name}"
            raise invalid(f"{name} does not belong to type {response_format.type}", name)
    if response_format.type == "text":
        return None
    if response_format.type == "json_object":
        name = "response_format"
        return name, Grammar(GrammarKind.JSON_OBJECT) if response_format.schema is None else schema_grammar(
            response_format.schema, f"{name}.schema"
        )
    if response_format.type == "structural_tag":
        return "response_format", Grammar(
            GrammarKind.STRUCTURAL_TAG,
            dump_json({"type": response_format.type, "format": structural_tag_format(response_format)}),
        )
    value = getattr(response_format, response_format.type)
    name = f"response_format.{response_format.type}"
    if value is None:
        raise invalid(f"{name} is required", name, "missing_field")
    if isinstance(value, JsonSchema):
        if value.schema is None:
            raise invalid(f"{name}.schema is required", f"{name}.schema", "missing_field")
        name = f"{name}.schema"
        check_schema_form(value.schema, name)
        schema = value.schema if value.strict or is_too_deep(value.schema) else relax_schema(value.schema)
        return name, schema_grammar(schema, name)
    return name, Grammar(GrammarKind.REGEX if response_format.type == "regex" else GrammarKind.EBNF, value)


def structural_tag_format(response_format: ResponseFormat) -> dict[str, Any]:
    """Return the format of a `structural_tag` in xgrammar's syntax.

    Raises:
        ApiError: 400 unless the request sets either `structures` and `triggers`, or `format`.
    """
    if (
        response_format.format is not None
        and response_format.structures is None
        and response_format.triggers is None
    ):
        return response_format.format
    if response_format.format is not None or not response_format.structures or not response_format.triggers:
        text = "response_format of type structural_tag needs either structures and triggers, or format"
        raise invalid(text, "response_format")
    tags = [
        {
            "type": "tag",
            "begin": structure.begin,
            "content": {"type": "json_schema", "json_schema": structure.schema, "max_whitespace_cnt": 0},
            "end": structure.end,
        }
        for structure in response_format.structures
    ]
    return {"type": "triggered_tags", "triggers": response_format.triggers, "tags": tags}


def structured_outputs_constraints(outputs: StructuredOutputs) -> Iterator[tuple[str, Grammar]]:
    """Yield the name and the grammar of each field that is set in vLLM's `structured_outputs`."""
    prefix = "structured_outputs."
    if outputs.json is not None:
        yield f"{prefix}json", schema_grammar(outputs.json, f"{prefix}json")
    if outputs.regex is not None:
        yield f"{prefix}regex", Grammar(GrammarKind.REGEX, outputs.regex)
    if outputs.choice is not None:
        yield f"{prefix}choice", alternatives_grammar(outputs.choice, f"{prefix}choice")
    if outputs.grammar is not None:
        yield f"{prefix}grammar", Grammar(GrammarKind.EBNF, outputs.grammar)
    if outputs.json_object:
        yield f"{prefix}json_object", Grammar(GrammarKind.JSON_OBJECT)
    if outputs.structural_tag is not None:
        yield f"{prefix}structural_tag", Grammar(GrammarKind.STRUCTURAL_TAG, outputs.structural_tag)


def schema_grammar(schema: Schema, name: str) -> Grammar:
    """Return the grammar of the JSON schema in field `name`.

    Raises:
        ApiError: 400 if the value is not a JSON schema, or is `false`, which nothing matches.
    """
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(f"{name} is not valid JSON: {error}", name, "invalid_json") from None
        if not isinstance(schema, (dict, bool)):
            raise invalid(f"{name} must be a JSON schema: an object or a boolean", name)
    check_schema_form(schema, name)
    if schema is False:
        raise invalid(f"{name} is the schema false, which nothing can match", name)
    return Grammar(GrammarKind.JSON_SCHEMA, dump_json({} if schema is True else schema))


def check_schema_form(schema: object, name: str) -> None:
    """Check that the keywords of the JSON schema in field `name` have values of the right kind.

    Raises:
        ApiError: 400 if a keyword has another value; the message gives its path.
    """
    fault = None if is_too_deep(schema) else find_schema_fault(schema)
    if fault is not None:
        raise invalid(f"{name}{fault[0]} {fault[1]}", name, "invalid_schema")


def alternatives_grammar(alternatives: list[str], name: str) -> Grammar:
    """Return a grammar that allows exactly the texts in field `name`.

    Raises:
        ApiError: 400 if there are no texts or too many, or a text is empty.
    """
    if not alternatives or not all(alternatives):
        raise invalid(f"{name} must hold non-empty texts", name)
    if len(alternatives) > MAX_ALTERNATIVES:
        raise invalid(f"{name} holds more than {MAX_ALTERNATIVES} texts", name)
    return choice_grammar(alternatives)


def dump_json(value: Any) -> str:
    """Return a value as JSON text. Keys keep their order, because a grammar follows the order of properties.

    Raises:
        ApiError: 400 if it is nested too deeply.
    """
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise nesting_error() from None


def nesting_error() -> ApiError:
    """Return a 400 error for a body that is nested too deeply."""
    return invalid("the body is nested too deeply", code="invalid_json")
