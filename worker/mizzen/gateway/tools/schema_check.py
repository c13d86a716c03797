"""Finds what is wrong with a JSON schema on its face; the engine that compiles it knows the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
MAX_DEPTH = 128
"""Levels of objects and lists within one another."""

DiscoveredEngine = tuple[str, str] | None
"""Path below the schema, and what is wrong there."""


def too_deep(value: object) -> bool:
    """Tell whether a JSON value is nested beyond what may be passed on."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for one in level for inner in _inner(one)]
        if not level:
            return False
    return True


def _inner(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def schema_error(schema: object) -> DiscoveredEngine:
    """Return the first thing that is wrong with a schema: where, and what; None when nothing is.

    The schema must not be `too_deep`.
    """
    if isinstance(schema, bool):
        return None
    if not isinstance(schema, dict):
        return "", "must be a JSON schema: an object or a boolean"
    for key, value in schema.items():
        check = _CHECKS.get(key)
        found = check(value) if check is not None else None
        if found is not None:
            path, reason = found
            return f".{key}{path}", reason
    return None


def _type(value: object) -> DiscoveredEngine:
    given = value if isinstance(value, list) else [value]
    if given and all(one in TYPES for one in given if isinstance(one, str)) and _texts(given):
        return None
    return "", f"must be one of {', '.join(TYPES)}, or a list of them"


def _texts(values: list[Any]) -> bool:
    return all(isinstance(one, str) for one in values)


def _named(value: object) -> DiscoveredEngine:
    """Check an object of schemas."""
    if not isinstance(value, dict):
        return "", "must be an object whose values are schemas"
    for name, schema in value.items():
        found = schema_error(schema)
        if found is not None:
            return f".{name}{found[0]}", found[1]
    return None


def _listed(value: object) -> DiscoveredEngine:
    """Check a list of schemas."""
    if not isinstance(value, list) or not value:
        return "", "must be a list of schemas, with one at least"
    for index, schema in enumerate(value):
        found = schema_error(schema)
        if found is not None:
            return f"[{index}]{found[0]}", found[1]
    return None


def _items(value: object) -> DiscoveredEngine:
    return _listed(value) if isinstance(value, list) else schema_error(value)


def _required(value: object) -> DiscoveredEngine:
    if isinstance(value, list) and _texts(value):
        return None
    return "", "must be a list of property names"


def _alternatives(value: object) -> DiscoveredEngine:
    return None if isinstance(value, list) and value else ("", "must be a list of values, with one at least")


def _text(value: object) -> DiscoveredEngine:
    return None if isinstance(value, str) else ("", "must be text")


def _number(value: object) -> DiscoveredEngine:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return None
    return "", "must be a number"


def _count(value: object) -> DiscoveredEngine:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 and value % 1 == 0:
        return None
    return "", "must be a whole number, 0 or more"


def _flag(value: object) -> DiscoveredEngine:
    return None if isinstance(value, bool) else ("", "must be true or false")


_CHECKS: dict[str, Callable[[object], DiscoveredEngine]] = {
    "type": _type,
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"), _named),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _listed),
    **dict.fromkeys(
        (
            *("additionalProperties", "unevaluatedProperties", "unevaluatedItems", "additionalItems"),
            *("not", "if", "then", "else", "contains", "propertyNames"),
        ),
        schema_error,
    ),
    "items": _items,
    "required": _required,
    "enum": _alternatives,
    **dict.fromkeys(("$ref", "pattern", "format", "title", "description", "$schema", "$id"), _text),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), _number),
    **dict.fromkeys(
        (
            *("minLength", "maxLength", "minItems", "maxItems"),
            *("minProperties", "maxProperties", "minContains", "maxContains"),
        ),
        _count,
    ),
    "uniqueItems": _flag,
}
