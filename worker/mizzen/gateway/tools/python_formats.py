# SPDX-License-Identifier: Apache-2.0
"""Output formats of tool calls in the syntax of Python, from which grammars are built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.gateway.tools import structural_tags
from mizzen.gateway.tools.call_formats import Calls, CallSchema, marked_formats
from mizzen.gateway.tools.structural_tags import Format

MAX_OPTIONAL = 24
"""Maximum number of optional arguments that are written with keys; the format grows with its square."""
_DEFINITIONS = ("$defs", "definitions")
_PLAIN_KEYWORDS = frozenset(
    ("type", "properties", "required", "additionalProperties", "title", "description", "$schema")
)


def python_call(call: CallSchema) -> Format:
    """Return the format of a call `name(key=value, …)`; values are JSON, which the parser accepts.

    Required arguments precede optional ones. If the schema has constraints that do not concern a single
    argument, or keys that are not identifiers, the call is `name(**{…})`.
    """
    arguments = keyword_arguments(call.schema)
    if arguments is None:
        arguments = [structural_tags.text("**"), structural_tags.json_value(call.schema)]
    begin = structural_tags.text(f"{call.name}(")
    return structural_tags.sequence(begin, *arguments, structural_tags.text(")"))


def keyword_arguments(schema: Format | bool) -> list[Format] | None:
    """Return the format of arguments with keys, as elements of a sequence; None if JSON is needed."""
    if not isinstance(schema, dict):
        return None
    properties, required = schema.get("properties"), schema.get("required", [])
    plain = schema.keys() <= _PLAIN_KEYWORDS | set(_DEFINITIONS) and schema.get("type") == "object"
    if not plain or not isinstance(properties, dict) or not all(key.isidentifier() for key in properties):
        return None
    if not properties and schema.get("additionalProperties") is not False:
        return None
    if not isinstance(required, list) or not all(key in properties for key in required):
        return None
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    values = {key: argument_format(key, value, definitions) for key, value in properties.items()}
    needed = [values[key] for key in properties if key in required]
    rest = [values[key] for key in properties if key not in required]
    if len(rest) > MAX_OPTIONAL:
        return None
    return joined(needed) + ([] if not rest else optional_arguments(rest, following=bool(needed)))


def argument_format(key: str, schema: Any, definitions: Mapping[str, Any]) -> Format:
    """Return the format of `key=value`; `definitions` holds schemas that the value's schema may refer to."""
    whole = {**definitions, **schema} if isinstance(schema, dict) else schema
    return structural_tags.sequence(structural_tags.text(f"{key}="), structural_tags.json_value(whole))


def joined(arguments: list[Format]) -> list[Format]:
    """Return the format of arguments with a comma between them, as elements of a sequence."""
    elements: list[Format] = []
    for argument in arguments:
        elements += [structural_tags.text(", "), argument] if elements else [argument]
    return elements


def optional_arguments(arguments: list[Format], following: bool) -> list[Format]:
    """Return the format of optional arguments, as elements of a sequence.

    `following` means that another argument precedes them.
    """
    comma = structural_tags.text(", ")
    if following:
        return [structural_tags.optional(structural_tags.sequence(comma, each)) for each in arguments]
    alternatives = [
        structural_tags.sequence(first, *optional_arguments(arguments[index + 1 :], following=True))
        for index, first in enumerate(arguments)
    ]
    return [structural_tags.optional(structural_tags.either(*alternatives))]


def olmo_calls(calls: Calls, allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of calls with a line break between them."""
    return structural_tags.repeated([*map(python_call, calls)], "\n", allow_parallel)


def python_list(calls: Calls, allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of a list of calls."""
    items = structural_tags.repeated([*map(python_call, calls)], ", ", allow_parallel)
    return structural_tags.sequence(structural_tags.text("["), items, structural_tags.text("]"))


def python_free(calls: Calls, allow_parallel: bool, tokenizer: Tokenizer) -> Format:
    """Return the format of output that is either a list of calls or text."""
    heads = [f"[{call.name}(" for call in calls]
    listed = python_list(calls, allow_parallel, tokenizer)
    return structural_tags.either(listed, structural_tags.any_text(*heads))


OLMO_FORMATS = marked_formats("<function_calls>", "</function_calls>", olmo_calls)
