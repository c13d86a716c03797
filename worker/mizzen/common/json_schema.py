# SPDX-License-Identifier: Apache-2.0
"""JSON Schema keywords (draft 2020-12), grouped by the type they constrain and by whether grammars enforce
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard
from urllib.parse import unquote

Schema = dict[str, Any]

CONDITIONS = ("if", "then", "else", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef")
"""Keywords that grammars do not enforce, but whose subschemas may describe properties of an object."""
NOT_ENFORCED = (
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired",
    "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef", "additionalItems",
)  # fmt: skip
LENGTHS = ("minLength", "maxLength")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
STRING = (*LENGTHS, "pattern")
NUMBER = (*BOUNDS, "multipleOf")
ARRAY = ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems", "uniqueItems")
OBJECT = (
    "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "unevaluatedProperties",
)  # fmt: skip
STRUCTURE = (*STRING, *NUMBER, *ARRAY, *OBJECT)
"""Keywords that constrain only values of one type, such as strings or arrays."""
EXTRA_MEMBERS = ("additionalProperties", "unevaluatedProperties")
"""Keywords that constrain those members of an object that its schema does not describe."""
CHOICES = ("$ref", "anyOf", "oneOf", "allOf")


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": is_number,
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def resolve_pointer(root: Any, reference: str) -> Any:
    """Return the value within a schema that a reference (`#` or `#/…`) points to; None if it has none."""
    pointer = unquote(reference)
    if pointer != "#" and not pointer.startswith("#/"):
        return None
    value = root
    for step in pointer.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and key.isascii() and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value
