# SPDX-License-Identifier: Apache-2.0
"""Decode JSON bodies into request structs; errors name the field and say what is wrong with it.

Endpoints use it through `BodyDecoder`, which also decides about fields that are not used.
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
INTEGER_EXPECTED = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_NUMBERS = re.compile(rb"\[?\s*[-0-9]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def decode_body(decoder: msgspec.json.Decoder[R], body: bytes | msgspec.Raw) -> R:
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
            if not INTEGER_EXPECTED.match(str(error)):
                raise
            return decoder.decode(convert_whole_floats(body))
    except msgspec.ValidationError as error:
        raise validation_error(str(error), decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise json_error(bytes(body), error) from None
    except RecursionError as error:
        raise json_error(b"", error) from None


def convert_whole_floats(body: bytes | msgspec.Raw) -> bytes:
    """Return JSON with the floats without a fraction as integers, in top-level values and top-level lists.

    Raises:
        msgspec.DecodeError: the body is not a JSON object.
    """
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({name: convert_numbers(value) for name, value in fields.items()})


def convert_numbers(value: msgspec.Raw) -> msgspec.Raw:
    """Convert a JSON number, or a list that begins with a number; return any other value unchanged."""
    if not _NUMBERS.match(value):
        return value
    number = msgspec.json.decode(value)
    if isinstance(number, float) and number.is_integer():
        return msgspec.Raw(str(int(number)))
    if not isinstance(number, list):
        return value
    try:
        return msgspec.Raw(msgspec.json.encode([to_integer(item) for item in number]))
    except OverflowError:
        return value


def to_integer(value: Any) -> Any:
    """Convert a float without a fraction to an integer; return any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def json_error(body: bytes, error: Exception) -> ApiError:
    """Return a 400 error for a body that is not valid JSON, or is nested too deeply.

    If a faulty value is found (see `find_invalid_value`), the error names its field.
    """
    if isinstance(error, RecursionError):
        return invalid("the body is nested too deeply", code="invalid_json")
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
