# SPDX-License-Identifier: Apache-2.0
"""Instances of messages for tests of their encoding; independent of Mizzen, to be used with any release."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec


def value_of(hint: Any, place: int) -> Any:
    """Return a value of a type; the value differs from all defaults and from values at other positions."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return value_of(next(arg for arg in args if arg is not type(None)), place)
    if origin is tuple:
        kinds = (args[0], args[0]) if args[-1] is Ellipsis else args
        return tuple(value_of(kind, 10 * place + at) for at, kind in enumerate(kinds, 1))
    if origin is list:
        return [value_of(args[0], 10 * place + at) for at in (1, 2)]
    if origin is dict:
        return {f"key{place}": value_of(args[1], place), f"key{place + 1}": value_of(args[1], place + 1)}
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return filled(hint, place)
    simple = {
        int: 1000 + place,
        float: place + 0.25,
        str: f"text {place}",
        bytes: bytes([place % 256, 0, 255]),
    }
    return simple[hint]


def filled(kind: type[msgspec.Struct], place: int = 0) -> Any:
    """Return an instance whose every field has a value other than its default."""
    hints = typing.get_type_hints(kind)
    values = {}
    for at, field in enumerate(msgspec.structs.fields(kind), place + 1):
        if hints[field.name] is bool:
            values[field.name] = field.default is not True
        else:
            values[field.name] = value_of(hints[field.name], at)
    return kind(**values)


def least(kind: type[msgspec.Struct]) -> Any:
    """Return an instance with only its required fields, set to None wherever their type allows that."""
    hints, values = typing.get_type_hints(kind), {}
    for at, field in enumerate(msgspec.structs.fields(kind), 1):
        if field.required:
            hint = hints[field.name]
            if type(None) in typing.get_args(hint):
                values[field.name] = None
            else:
                values[field.name] = at % 2 == 0 if hint is bool else value_of(hint, at)
    return kind(**values)
