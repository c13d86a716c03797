# SPDX-License-Identifier: Apache-2.0
"""Counts and bounds of JSON schemas in the form in which an engine enforces them."""

from __future__ import annotations

import math

from mizzen.common.json_schema import BOUNDS, Schema, is_number

LIMIT = 2**63
"""Absolute value that the bounds of numbers must not reach in an engine."""
RANGES = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))
COUNTS = ("multipleOf", *(name for names in RANGES for name in names))


def normalize_counts(schema: Schema) -> Schema:
    """Return a schema whose counts are integers (`3` for `3.0`), without counts that exclude each other."""
    result = dict(schema)
    for name in COUNTS:
        value = result.get(name)
        if isinstance(value, float) and value.is_integer():
            result[name] = int(value)
    for low, high in RANGES:
        if is_number(result.get(low)) and is_number(result.get(high)) and result[low] > result[high]:
            del result[low], result[high]
    return result


def relax_bounds(schema: Schema, *, integer: bool) -> None:
    """Drop bounds that an engine cannot enforce, and replace fractional bounds of integers.

    An engine cannot enforce bounds of `LIMIT` or more, nor bounds that exclude every number.
    """
    for name in BOUNDS:
        value = schema.get(name)
        if value is not None and not (is_number(value) and abs(value) < LIMIT):
            del schema[name]
    if integer:
        _round_bounds(schema)
    low = max((schema[name] for name in ("minimum", "exclusiveMinimum") if name in schema), default=None)
    high = min((schema[name] for name in ("maximum", "exclusiveMaximum") if name in schema), default=None)
    if low is None or high is None:
        return
    exclusive = (schema.get("exclusiveMinimum") == low) + (schema.get("exclusiveMaximum") == high)
    is_empty = high - low < exclusive if integer else low > high or (low == high and exclusive)
    if is_empty:
        for name in BOUNDS:
            schema.pop(name, None)


def _round_bounds(schema: Schema) -> None:
    for name, exclusive, take, nearest in (
        ("minimum", "exclusiveMinimum", max, math.ceil),
        ("maximum", "exclusiveMaximum", min, math.floor),
    ):
        if isinstance(schema.get(exclusive), float) and not schema[exclusive].is_integer():
            bound = nearest(schema.pop(exclusive))  # the next integer is allowed
            schema[name] = take(schema.get(name, bound), bound)
        for key in (name, exclusive):
            if isinstance(schema.get(key), float):
                schema[key] = nearest(schema[key])
