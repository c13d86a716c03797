"""Constraints on an answer's form: OpenAI's `response_format`, and the fields of vLLM and SGLang."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mizzen.core.sampling_params import Grammar, GrammarKind
from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.tools.relax_schema import widened
from mizzen.gateway.tools.schema_check import too_deep as too_nested

if TYPE_CHECKING:
    from mizzen.gateway.openai.schemas import Common

MAX_GRAMMAR_CHARACTERS = 512 * 1024
MAX_ALTERNATIVES = 4096

Schema = str | dict[str, Any] | bool
"""A JSON schema: as an object, or as its text."""


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A named schema in `response_format`."""

    name: Annotated[str, Meta(description="Any name.")]
    schema: Annotated[dict[str, Any] | bool | None, Meta(description="The JSON schema.")] = None
    strict: Annotated[
        bool | None,
        Meta(
            description="Reject a schema that cannot be enforced completely; otherwise it is enforced as "
            "far as possible."
        ),
    ] = None
    description: Annotated[str | None, Meta(description="Accepted, not used.")] = None


class Structure(msgspec.Struct, forbid_unknown_fields=True):
    """A constrained part of a free text."""

    begin: Annotated[str, Meta(description="Text that begins the part.")]
    end: Annotated[str, Meta(description="Text that ends the part.")]
    schema: Annotated[dict[str, Any] | bool, Meta(description="JSON schema of the text in between.")] = True


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Format of the answer."""

    type: Annotated[
        Literal["text", "json_object", "json_schema", "regex", "ebnf", "grammar", "structural_tag"],
        Meta(description="Format of the answer."),
    ]
    json_schema: Annotated[JsonSchema | None, Meta(description="With type `json_schema`.")] = None
    schema: Annotated[
        dict[str, Any] | None, Meta(description="With type `json_object`: a schema, as in Together's API.")
    ] = None
    regex: Annotated[str | None, Meta(description="With type `regex`.")] = None
    ebnf: Annotated[str | None, Meta(description="With type `ebnf`.")] = None
    grammar: Annotated[str | None, Meta(description="With type `grammar`: same as `ebnf`.")] = None
    structures: Annotated[
        list[Structure] | None,
        Meta(
            description="With type `structural_tag`: parts, each between two given texts, that conform to "
            "schemas."
        ),
    ] = None
    triggers: Annotated[
        list[str] | None,
        Meta(description="With `structures`: texts after which one of the structures must follow."),
    ] = None
    format: Annotated[
        dict[str, Any] | None,
        Meta(
            description="With type `structural_tag`: xgrammar's own format, instead of `structures` and "
            "`triggers`."
        ),
    ] = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """vLLM's `structured_outputs`: exactly one of these."""

    json: Annotated[Schema | None, Meta(description="A JSON schema.")] = None
    regex: Annotated[str | None, Meta(description="A regular expression.")] = None
    choice: Annotated[list[str] | None, Meta(description="List of allowed answers.")] = None
    grammar: Annotated[str | None, Meta(description="An EBNF grammar.")] = None
    json_object: Annotated[bool | None, Meta(description="Any JSON object.")] = None
    structural_tag: Annotated[str | None, Meta(description="xgrammar's structural tag, as JSON text.")] = None


def grammar(request: Common) -> tuple[str, Grammar] | None:
    """Return what a request's answer must conform to, and the field that says so.

    Raises:
        ApiError: 400 for several constraints, or one that is wrong on its face; the engine checks the rest.
    """
    found = [*constraints(request)]
    if len(found) > 1:
        first, second = found[0][0], found[1][0]
        raise invalid(f"{first} and {second} both constrain the answer; give one of them", second)
    if not found:
        return None
    name, made = found[0]
    if len(made.text) > MAX_GRAMMAR_CHARACTERS:
        raise invalid(f"{name} is longer than {MAX_GRAMMAR_CHARACTERS} characters", name, "grammar_too_large")
    if not made.text and made.kind != GrammarKind.JSON_OBJECT:
        raise invalid(f"{name} is empty", name)
    return name, made


def constraints(request: Common) -> Iterator[tuple[str, Grammar]]:
    """Yield the constraints of a request with the names of their fields."""
    given = response_format(request.response_format)
    if given is not None:
        yield given
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
        yield "guided_choice", choice_grammar(request.guided_choice, "guided_choice")
    if request.structured_outputs is not None:
        yield from structured(request.structured_outputs)


def response_format(given: ResponseFormat | None) -> tuple[str, Grammar] | None:
    """Return the constraint of a `response_format`, and the field that holds it; None for text.

    Raises:
        ApiError: 400 when the type's own field is missing, or another type's is there.
    """
    if given is None:
        return None
    fields = {
        "json_schema": ("json_schema",),
        "json_object": ("schema",),
        "structural_tag": ("structures", "triggers", "format"),
    }
    own = fields.get(given.type, (given.type,))
    for field in msgspec.structs.fields(given):
        if field.name not in ("type", *own) and getattr(given, field.name) is not None:
            name = f"response_format.{field.name}"
            raise invalid(f"{name} does not belong to type {given.type}", name)
    if given.type == "text":
        return None
    if given.type == "json_object":
        name = "response_format"
        return name, Grammar(GrammarKind.JSON_OBJECT) if given.schema is None else schema_grammar(
            given.schema, f"{name}.schema"
        )
    if given.type == "structural_tag":
        return "response_format", Grammar(
            GrammarKind.STRUCTURAL_TAG, dumped({"type": given.type, "format": tag_format(given)})
        )
    value = getattr(given, given.type)
    name = f"response_format.{given.type}"
    if value is None:
        raise invalid(f"{name} is required", name, "missing_field")
    if isinstance(value, JsonSchema):
        if value.schema is None:
            raise invalid(f"{name}.schema is required", f"{name}.schema", "missing_field")
        schema = value.schema if value.strict or too_nested(value.schema) else widened(value.schema)
        return f"{name}.schema", schema_grammar(schema, f"{name}.schema")
    return name, Grammar(GrammarKind.REGEX if given.type == "regex" else GrammarKind.EBNF, value)


def tag_format(given: ResponseFormat) -> dict[str, Any]:
    """Return the format of a `structural_tag`, in xgrammar's form.

    Raises:
        ApiError: 400 when it is neither of both forms.
    """
    if given.format is not None and given.structures is None and given.triggers is None:
        return given.format
    if given.format is not None or not given.structures or not given.triggers:
        text = "response_format of type structural_tag needs either structures and triggers, or format"
        raise invalid(text, "response_format")
    tags = [
        {
            "type": "tag",
            "begin": one.begin,
            "content": {"type": "json_schema", "json_schema": one.schema, "max_whitespace_cnt": 0},
            "end": one.end,
        }
        for one in given.structures
    ]
    return {"type": "triggered_tags", "triggers": given.triggers, "tags": tags}


def structured(given: StructuredOutputs) -> Iterator[tuple[str, Grammar]]:
    """Yield the constraints of vLLM's `structured_outputs`."""
    where = "structured_outputs."
    if given.json is not None:
        yield f"{where}json", schema_grammar(given.json, f"{where}json")
    if given.regex is not None:
        yield f"{where}regex", Grammar(GrammarKind.REGEX, given.regex)
    if given.choice is not None:
        yield f"{where}choice", choice_grammar(given.choice, f"{where}choice")
    if given.grammar is not None:
        yield f"{where}grammar", Grammar(GrammarKind.EBNF, given.grammar)
    if given.json_object:
        yield f"{where}json_object", Grammar(GrammarKind.JSON_OBJECT)
    if given.structural_tag is not None:
        yield f"{where}structural_tag", Grammar(GrammarKind.STRUCTURAL_TAG, given.structural_tag)


def schema_grammar(schema: Schema, name: str) -> Grammar:
    """Return the grammar of a JSON schema.

    Raises:
        ApiError: 400 when it is no schema at all.
    """
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(f"{name} is not valid JSON: {error}", name, "invalid_json") from None
        if not isinstance(schema, (dict, bool)):
            raise invalid(f"{name} must be a JSON schema: an object or a boolean", name)
    if schema is False:
        raise invalid(f"{name} is the schema false, to which nothing conforms", name)
    return Grammar(GrammarKind.JSON_SCHEMA, dumped({} if schema is True else schema))


def choice_grammar(alternatives: list[str], name: str) -> Grammar:
    """Return the grammar of one text among several.

    Raises:
        ApiError: 400 when there are none, too many, or an empty one.
    """
    if not alternatives or not all(alternatives):
        raise invalid(f"{name} must hold texts that are not empty", name)
    if len(alternatives) > MAX_ALTERNATIVES:
        raise invalid(f"{name} holds more than {MAX_ALTERNATIVES} texts", name)
    # JSON's escapes are EBNF's too; those of \u take four digits, so characters stay as they are
    quoted = (json.dumps(one, ensure_ascii=False) for one in dict.fromkeys(alternatives))
    return Grammar(GrammarKind.EBNF, "root ::= " + " | ".join(quoted))


def dumped(value: Any) -> str:
    """Return a value as JSON text, keys in their order: a schema's order of properties counts.

    Raises:
        ApiError: 400 when it is nested too deeply.
    """
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise too_deep() from None


def too_deep() -> ApiError:
    """Return the 400 of a body that is nested too deeply."""
    return invalid("the body is nested too deeply", code="invalid_json")
