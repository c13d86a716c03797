"""Decode JSON bodies into request structs; errors name the field and say what is wrong with it.

Every endpoint's parser calls `decode_body`, and `reject_unsupported` for fields that are not supported.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar

import msgspec

from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.requests.allowed_values import allowed_values

R = TypeVar("R")

BOUNDS = {"<=": "at most", "<": "below", ">=": "at least", ">": "above"}
MAX_EXPLAINED_BYTES = 64 * 1024
"""Maximum size of an invalid body that is searched for the faulty value; the search holds the GIL."""
MAX_PATH_CHARACTERS = 200
"""Maximum length of a field path in an error message."""
_INTEGER_EXPECTED = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_SURROGATE = re.compile("[\ud800-\udfff]")


def decode_body(decoder: msgspec.json.Decoder[R], body: bytes) -> R:
    """Decode a body into a request.

    Integers may be written as `3.0`, because some languages have only floats.

    Raises:
        ApiError: 400 if the body is not JSON or does not match the request type; the error names the field
            and the fault.
    """
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            if not _INTEGER_EXPECTED.match(str(error)):
                raise
            return msgspec.convert(convert_whole_floats(msgspec.json.decode(body)), decoder.type)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise json_error(body, error) from None
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None


def convert_whole_floats(body: Any) -> Any:
    """Convert floats without a fraction to integers, in a body's top-level values and top-level lists."""
    if not isinstance(body, dict):
        return body
    return {
        name: [to_integer(item) for item in value] if isinstance(value, list) else to_integer(value)
        for name, value in body.items()
    }


def to_integer(value: Any) -> Any:
    """Convert a float without a fraction to an integer; return any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def json_error(body: bytes, error: Exception) -> ApiError:
    """Return a 400 error for a body that is not valid JSON.

    If a faulty value is found (see `find_invalid_value`), the error names its field.
    """
    if not body.strip():
        return invalid("the body is empty; it must be a JSON object", code="invalid_json")
    try:
        text = body.decode()
    except UnicodeDecodeError as unicode_error:
        return invalid(
            f"the body is not UTF-8: {unicode_error.reason} at byte {unicode_error.start}",
            code="invalid_json",
        )
    if text.startswith("\ufeff"):
        return invalid("the body begins with a byte order mark: leave it out", code="invalid_json")
    invalid_value = find_invalid_value(text) if len(body) <= MAX_EXPLAINED_BYTES else None
    if invalid_value is None:
        return invalid(f"the body is not valid JSON: {error}", code="invalid_json")
    path, reason = invalid_value
    return invalid(
        f"{path[:MAX_PATH_CHARACTERS] or 'the body'} {reason}",
        path[:MAX_PATH_CHARACTERS] or None,
        "invalid_json",
    )


def find_invalid_value(text: str) -> tuple[str, str] | None:
    """Return the path and the fault of a value that JSON does not allow; None if no such value is found.

    Python's JSON reader accepts these values: NaN, Infinity and unpaired surrogates.
    """
    try:
        waiting = [("", json.loads(text))]
    except (ValueError, RecursionError):
        return None
    while waiting:
        path, value = waiting.pop()
        texts = value if isinstance(value, dict) else (value,) if isinstance(value, str) else ()
        surrogate = next(filter(None, map(_SURROGATE.search, texts)), None)
        if surrogate is not None:
            return (
                path,
                f"holds \\u{ord(surrogate[0]):04x}, which is half of a character (an unpaired surrogate)",
            )
        if isinstance(value, float) and not math.isfinite(value):
            return path, "is not a valid JSON number: NaN and Infinity are not allowed"
        if isinstance(value, list):
            waiting += [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        if isinstance(value, dict):
            waiting += [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    return None


def validation_error(text: str, kind: Any) -> ApiError:
    """Convert a msgspec message, such as "Expected `int`, got `str` - at `$.seed`", to a 400 error.

    Args:
        text: The message.
        kind: Type that the body was decoded to. If this type lists the field's values, the error names them.
    """
    reason, _, path = text.partition(" - at `")
    path = path.rstrip("`").removeprefix("key in ").removeprefix("$").removeprefix(".").replace("[...]", "")
    field = re.search(r"(unknown|required) field `([^`]*)`", reason)
    if field:
        name = f"{path}.{field[2]}" if path else field[2]
        if field[1] == "unknown":
            name = name[:MAX_PATH_CHARACTERS]
            return invalid(f"{name} is not a supported field", name, "unknown_field")
        return invalid(f"{name} is required", name, "missing_field")
    if not path:
        return invalid(f"the body must be a JSON object: {reason}", code="invalid_type")
    bound = re.fullmatch(r"Expected `(?:int|float)` (<=|<|>=|>) (-?[0-9.e+-]+)", reason)
    if bound:
        text = f"{path} must be {BOUNDS[bound[1]]} {float(bound[2]):.12g}"
        return invalid(text, path, "out_of_range")
    reason = reason[0].lower() + reason[1:MAX_PATH_CHARACTERS]
    if reason.startswith("invalid ") and (values := allowed_values(kind, path)):
        reason += f"; it must be {' or '.join(filter(None, (', '.join(values[:-1]), values[-1])))}"
    return invalid(f"{path}: {reason}", path, "invalid_type")


def reject_unsupported(request: msgspec.Struct, noop_values: dict[str, tuple[Any, ...]]) -> None:
    """Reject a request that sets an unsupported field.

    `noop_values` maps each unsupported field to the values (besides null) that are accepted, because they
    change nothing.

    Raises:
        ApiError: 400 if an unsupported field has any other value; the error names the field.
    """
    for name in request.__struct_fields__:
        value = getattr(request, name)
        if value is None or name not in noop_values:
            continue
        if not any(value == noop and same_kind(value, noop) for noop in noop_values[name]):
            raise invalid(f"{name} is not supported (leave it out)", name, "unsupported_parameter")


def same_kind(value: object, other: object) -> bool:
    """Return whether both values are booleans or neither is. (In Python, 0 equals False.)"""
    return isinstance(value, bool) == isinstance(other, bool)
