# SPDX-License-Identifier: Apache-2.0
"""JSON as Go's encoding/json writes it, for data that the API server compares byte by byte."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec

_ESCAPED = {"<": b"\\u003c", ">": b"\\u003e", "&": b"\\u0026", "\u2028": b"\\u2028", "\u2029": b"\\u2029"}
_LEAST_PLAIN, _LEAST_EXPONENT = 1e-6, 1e21


def go_json(value: Any) -> bytes:
    """Encode a value with sorted keys and no white space; `<`, `>`, `&`, U+2028 and U+2029 are escaped."""
    encoded = msgspec.json.encode(_with_go_numbers(value), order="deterministic")
    for character, escaped in _ESCAPED.items():  # they occur only in strings
        encoded = encoded.replace(character.encode(), escaped)
    return encoded


def has_sorted_keys(value: Any) -> bool:
    """Return whether all keys of a decoded value are in the order in which Go writes them."""
    if isinstance(value, dict):
        return list(value) == sorted(value) and all(map(has_sorted_keys, value.values()))
    return not isinstance(value, list) or all(map(has_sorted_keys, value))


def _with_go_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_go_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_go_numbers(item) for item in value]
    return msgspec.Raw(_number(value)) if isinstance(value, float) else value


def _number(value: float) -> str:
    """Format a float with the fewest digits that identify it, and an exponent wherever Go uses one."""
    if value == 0:
        return "0"
    if _LEAST_PLAIN <= abs(value) < _LEAST_EXPONENT:
        return format(Decimal(repr(value)), "f").removesuffix(".0")
    return repr(value).replace("e-0", "e-")
