# SPDX-License-Identifier: Apache-2.0
"""Schemas of the fields that constrain output: `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Schema = str | dict[str, Any] | bool
"""JSON schema as an object, a boolean, or JSON text."""


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Named schema in `response_format`."""

    name: Annotated[str, Meta(description="Any name.")]
    schema: Annotated[dict[str, Any] | bool | None, Meta(description="The JSON schema.")] = None
    strict: Annotated[
        bool | None,
        Meta(
            description="Reject a schema that cannot be enforced completely; otherwise it is enforced as "
            "far as possible."
        ),
    ] = None
    description: Annotated[
        str | None, Meta(description="Shown to gpt-oss beside the schema; other models do not use it.")
    ] = None


class Structure(msgspec.Struct, forbid_unknown_fields=True):
    """Part of an otherwise unconstrained answer: text between `begin` and `end` that conforms to a schema."""

    begin: Annotated[str, Meta(description="Text that begins the part.")]
    end: Annotated[str, Meta(description="Text that ends the part.")]
    schema: Annotated[dict[str, Any] | bool, Meta(description="JSON schema of the text in between.")] = True


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Format of the answer."""

    type: Annotated[
        Literal["text", "json_object", "json_schema", "regex", "ebnf", "grammar", "structural_tag"],
        Meta(description="Format of the answer."),
    ]
    json_schema: Annotated[JsonSchema | None, Meta(description="With type `json_schema`: the schema.")] = None
    schema: Annotated[
        dict[str, Any] | None, Meta(description="With type `json_object`: a schema, as in Together's API.")
    ] = None
    regex: Annotated[
        str | None, Meta(description="With type `regex`: regular expression for the whole answer.")
    ] = None
    ebnf: Annotated[str | None, Meta(description="With type `ebnf`: EBNF grammar (GBNF syntax).")] = None
    grammar: Annotated[str | None, Meta(description="With type `grammar`: same as `ebnf`.")] = None
    structures: Annotated[
        list[Structure] | None,
        Meta(
            description="With type `structural_tag`: the constrained parts of the answer, each between a "
            "`begin` and an `end` text."
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
    """Constraint on the answer, in the form of vLLM's `structured_outputs`; exactly one field must be set."""

    json: Annotated[Schema | None, Meta(description="A JSON schema.")] = None
    regex: Annotated[str | None, Meta(description="A regular expression.")] = None
    choice: Annotated[list[str] | None, Meta(description="List of allowed answers.")] = None
    grammar: Annotated[str | None, Meta(description="An EBNF grammar.")] = None
    json_object: Annotated[bool | None, Meta(description="Any JSON object.")] = None
    structural_tag: Annotated[str | None, Meta(description="xgrammar's structural tag, as JSON text.")] = None
