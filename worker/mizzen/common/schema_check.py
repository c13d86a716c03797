# SPDX-License-Identifier: Apache-2.0
"""Check that a JSON schema is well-formed; the engine that compiles it checks the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mizzen.common.json_schema import is_number

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
MAX_DEPTH = 128
"""Maximum nesting depth of objects and lists."""

SchemaFault = tuple[str, str] | None
"""Path from a schema to its fault, and a description of the fault; None if the schema has no fault."""


def is_too_deep(value: object) -> bool:
    """Return whether a JSON value is nested more than `MAX_DEPTH` levels deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for parent in level for inner in _children(parent)]
        if not level:
            return False
    return True


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def find_schema_fault(schema: object) -> SchemaFault:
    """Return the path and the description of a schema's first fault; None if it has no fault.

    `is_too_deep` must be false for the schema.
    """
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        return "", "must be a JSON schema: an object or a boolean"
    for key, value in schema.items():
        check = _CHECKS.get(key)
        fault = check(value) if check is not None else None
        if fault is not None:
            path, reason = fault
            return f".{key}{path}", reason
    return None


def find_keyword_fault(keyword: str, value: object) -> str | None:
    """Return the fault of a keyword's value; None if it has none, or only in the schemas that it holds."""
    check = _CHECKS.get(keyword)
    if check is None or check in (find_schema_fault, _check_schema_list, _check_items):
        return None
    if check is _check_named_schemas and isinstance(value, dict):
        return None
    fault = check(value)
    return None if fault is None else fault[1]


def _check_type(value: object) -> SchemaFault:
    names = value if isinstance(value, list) else [value]
    if names and all(name in TYPES for name in names if isinstance(name, str)) and _all_strings(names):
        return None
    return "", f"must be one of {', '.join(TYPES)}, or a list of them"


def _all_strings(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _check_named_schemas(value: object) -> SchemaFault:
    """Return the first fault of an object whose values must be schemas; None if it has no fault."""
    if not isinstance(value, dict):
        return "", "must be an object whose values are schemas"
    for name, schema in value.items():
        fault = find_schema_fault(schema)
        if fault is not None:
            return f".{name}{fault[0]}", fault[1]
    return None


def _check_schema_list(value: object) -> SchemaFault:
    """Return the first fault of a list of schemas, which must not be empty; None if it has no fault."""
    if not isinstance(value, list) or not value:
        return "", "must be a list of at least one schema"
    for index, schema in enumerate(value):
        fault = find_schema_fault(schema)
        if fault is not None:
            return f"[{index}]{fault[0]}", fault[1]
    return None


def _check_items(value: object) -> SchemaFault:
    return _check_schema_list(value) if isinstance(value, list) else find_schema_fault(value)


def _check_required(value: object) -> SchemaFault:
    if isinstance(value, list) and _all_strings(value):
        return None
    return "", "must be a list of property names"


def _check_enum(value: object) -> SchemaFault:
    return None if isinstance(value, list) and value else ("", "must be a list of at least one value")


def _check_string(value: object) -> SchemaFault:
    return None if isinstance(value, str) else ("", "must be text")


def _check_number(value: object) -> SchemaFault:
    if is_number(value):
        return None
    return "", "must be a number"


def _check_exclusive(value: object) -> SchemaFault:
    """Check an exclusive bound; it is a flag beside the bound in draft 4, which engines do not enforce."""
    return None if isinstance(value, bool) else _check_number(value)


def is_count(value: object) -> bool:
    """Return whether a value is a whole number of 0 or more."""
    return is_number(value) and value >= 0 and value % 1 == 0


def _check_count(value: object) -> SchemaFault:
    return None if is_count(value) else ("", "must be a whole number, 0 or more")


def _check_flag(value: object) -> SchemaFault:
    return None if isinstance(value, bool) else ("", "must be true or false")


_CHECKS: dict[str, Callable[[object], SchemaFault]] = {
    "type": _check_type,
    **dict.fromkeys(
        ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"), _check_named_schemas
    ),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _check_schema_list),
    **dict.fromkeys(
        (
            *("additionalProperties", "unevaluatedProperties", "unevaluatedItems", "additionalItems"),
            *("not", "if", "then", "else", "contains", "propertyNames"),
        ),
        find_schema_fault,
    ),
    "items": _check_items,
    "required": _check_required,
    "enum": _check_enum,
    **dict.fromkeys(("$ref", "pattern", "format", "title", "description", "$schema", "$id"), _check_string),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), _check_number),
    **dict.fromkeys(
        (
            *("minLength", "maxLength", "minItems", "maxItems"),
            *("minProperties", "maxProperties", "minContains", "maxContains"),
        ),
        _check_count,
    ),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _check_exclusive),
    "uniqueItems": _check_flag,
}
