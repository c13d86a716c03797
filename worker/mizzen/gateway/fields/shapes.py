# SPDX-License-Identifier: Apache-2.0
"""Shapes of request types: the objects whose fields are known, and how they are nested in each other.

Values of other types, such as JSON schemas and template variables, have no shape: their members belong to the
user, and are not fields of the API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec.inspect as inspect

from mizzen.gateway.requests.allowed_values import inspect_type, unwrap_type


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """An object with known fields; the shape of a field is None if nothing in it needs to be examined."""

    fields: Mapping[str, Shape | None]
    tag_field: str | None
    """Name of the field whose value tells the objects of a union apart; None if there is no such field."""
    tag: Any


@dataclass(frozen=True, slots=True)
class Shape:
    """A value that may be one of several objects, or a list of such values."""

    objects: tuple[ObjectShape, ...]
    item: Shape | None


@lru_cache(maxsize=64)
def shape_of_type(kind: Any) -> Shape | None:
    """Return the shape of a request type, which must not contain itself; None if it has no known fields."""
    return find_shape(inspect_type(kind))


def find_shape(kind: inspect.Type) -> Shape | None:
    """Return the shape of a type that msgspec describes; None if it has no known fields."""
    objects: list[ObjectShape] = []
    item: Shape | None = None
    for member in unwrap_type(kind):
        if isinstance(member, inspect.StructType):
            fields = {field.encode_name: find_shape(field.type) for field in member.fields}
            if member.tag_field is not None:
                fields[member.tag_field] = None
            objects.append(ObjectShape(fields, member.tag_field, member.tag))
        elif isinstance(member, inspect.ListType):
            item = item or find_shape(member.item_type)
    return Shape(tuple(objects), item) if objects or item else None
