# SPDX-License-Identifier: Apache-2.0
"""List the values that a field of a request type allows, for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec.inspect as inspect


@lru_cache(maxsize=64)
def inspect_type(kind: Any) -> inspect.Type:
    """Return msgspec's description of a request type."""
    return inspect.type_info(kind)


def allowed_values(kind: Any, path: str) -> tuple[str, ...]:
    """Return, as strings, the values that a field's type lists; empty if the type does not list values.

    Args:
        kind: The request type.
        path: Path of the field, such as `tool_choice.type` or `messages[1].role`.
    """
    types = list(unwrap_type(inspect_type(kind)))
    for step in re.findall(r"\[\d+\]|[^.\[]+", path):
        types = [inner for candidate in types for inner in step_into(candidate, step)]
    values = [value for candidate in types for value in literal_values(candidate)]
    return tuple(dict.fromkeys(values))


def unwrap_type(kind: inspect.Type) -> Iterator[inspect.Type]:
    """Yield a type without its metadata; for a union, yield each member without metadata."""
    if isinstance(kind, inspect.Metadata):
        yield from unwrap_type(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for member in kind.types:
            yield from unwrap_type(member)
    else:
        yield kind


def step_into(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """Yield the types that a step of a path leads to: a list's items (`[0]`), or an object's field (`name`).

    For the tag field of a struct, yield a literal type whose only value is the tag.
    """
    if step.startswith("["):
        if isinstance(kind, inspect.ListType):
            yield from unwrap_type(kind.item_type)
    elif isinstance(kind, inspect.StructType):
        if kind.tag_field == step:
            yield inspect.LiteralType((kind.tag,))
        for field in kind.fields:
            if field.encode_name == step:
                yield from unwrap_type(field.type)


def literal_values(kind: inspect.Type) -> Iterator[str]:
    """Yield the values of a literal type as strings."""
    if isinstance(kind, inspect.LiteralType):
        yield from (str(value) for value in kind.values)
