"""Which values a field of a request may have, for messages of errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec.inspect as inspect


@lru_cache(maxsize=64)
def described(kind: Any) -> inspect.Type:
    """Return msgspec's description of a request's type."""
    return inspect.type_info(kind)


def allowed_values(kind: Any, path: str) -> tuple[str, ...]:
    """Return the texts that a place of a request may hold, empty where they are not listed.

    Args:
        kind: The request's type.
        path: The place, such as `tool_choice.type` or `messages[1].role`.
    """
    places = list(plain(described(kind)))
    for step in re.findall(r"\[\d+\]|[^.\[]+", path):
        places = [inner for place in places for inner in within(place, step)]
    values = [value for place in places for value in listed(place)]
    return tuple(dict.fromkeys(values))


def plain(kind: inspect.Type) -> Iterator[inspect.Type]:
    """Yield the types that a value of a type may be of, without what is said about them."""
    if isinstance(kind, inspect.Metadata):
        yield from plain(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from plain(one)
    else:
        yield kind


def within(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """Yield the types of a list's items (`[0]`), or of an object's field; a tag is a literal."""
    if step.startswith("["):
        if isinstance(kind, inspect.ListType):
            yield from plain(kind.item_type)
    elif isinstance(kind, inspect.StructType):
        if kind.tag_field == step:
            yield inspect.LiteralType((kind.tag,))
        for field in kind.fields:
            if field.encode_name == step:
                yield from plain(field.type)


def listed(kind: inspect.Type) -> Iterator[str]:
    """Yield the texts of a literal."""
    if isinstance(kind, inspect.LiteralType):
        yield from (str(value) for value in kind.values)
