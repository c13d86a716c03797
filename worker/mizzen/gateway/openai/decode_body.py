"""From bytes to request objects; everything that is wrong with a body is named here."""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar

import msgspec

from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.openai.allowed_values import allowed_values

R = TypeVar("R")

BOUNDS = {"<=": "at most", "<": "below", ">=": "at least", ">": "above"}
EXPLAINED_BYTES = 64 * 1024
"""What is no JSON is looked at more closely up to this length: that holds the interpreter."""
MAX_PATH = 200
"""Characters of a place in a message."""
_WHOLE_WANTED = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_SURROGATE = re.compile("[\ud800-\udfff]")


def decode(decoder: msgspec.json.Decoder[R], body: bytes) -> R:
    """Return the request in a body. A whole number may be written as `3.0`: many languages know no other.

    Raises:
        ApiError: 400, which names the field and what is wrong with it.
    """
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            if not _WHOLE_WANTED.match(str(error)):
                raise
            return msgspec.convert(with_whole_numbers(msgspec.json.decode(body)), decoder.type)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise unreadable(body, error) from None
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None


def with_whole_numbers(body: Any) -> Any:
    """Return a body in which fields that are whole numbers, or lists of them, hold integers."""
    if not isinstance(body, dict):
        return body
    return {
        name: [whole(one) for one in value] if isinstance(value, list) else whole(value)
        for name, value in body.items()
    }


def whole(value: Any) -> Any:
    """Return a number without its fraction, if that is 0; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def unreadable(body: bytes, error: Exception) -> ApiError:
    """Return the 400 of a body that is no JSON; it names the field where one alone is at fault."""
    if not body.strip():
        return invalid("the body is empty; it must be a JSON object", code="invalid_json")
    try:
        text = body.decode()
    except UnicodeDecodeError as wrong:
        return invalid(f"the body is not UTF-8: {wrong.reason} at byte {wrong.start}", code="invalid_json")
    if text.startswith("\ufeff"):
        return invalid("the body begins with a byte order mark: leave it out", code="invalid_json")
    found = odd_value(text) if len(body) <= EXPLAINED_BYTES else None
    if found is None:
        return invalid(f"the body is not valid JSON: {error}", code="invalid_json")
    path, reason = found
    return invalid(f"{path[:MAX_PATH] or 'the body'} {reason}", path[:MAX_PATH] or None, "invalid_json")


def odd_value(text: str) -> tuple[str, str] | None:
    """Return where a text holds a value that other readers of JSON take, and what is wrong with it."""
    try:
        waiting = [("", json.loads(text))]
    except (ValueError, RecursionError):
        return None
    while waiting:
        path, value = waiting.pop()
        texts = value if isinstance(value, dict) else (value,) if isinstance(value, str) else ()
        half = next(filter(None, map(_SURROGATE.search, texts)), None)
        if half is not None:
            return path, f"holds \\u{ord(half[0]):04x}, which is half of a character (an unpaired surrogate)"
        if isinstance(value, float) and not math.isfinite(value):
            return path, "is no number that JSON has: NaN and Infinity are none"
        if isinstance(value, list):
            waiting += [(f"{path}[{index}]", one) for index, one in enumerate(value)]
        if isinstance(value, dict):
            waiting += [(f"{path}.{key}" if path else key, one) for key, one in value.items()]
    return None


def validation_error(text: str, kind: Any) -> ApiError:
    """Return the 400 of a message of msgspec, such as "Expected `int`, got `str` - at `$.seed`".

    Args:
        text: The message.
        kind: The type that was decoded, which knows the values that a field may have.
    """
    reason, _, path = text.partition(" - at `")
    path = path.rstrip("`").removeprefix("key in ").removeprefix("$").removeprefix(".").replace("[...]", "")
    field = re.search(r"(unknown|required) field `([^`]*)`", reason)
    if field:
        name = f"{path}.{field[2]}" if path else field[2]
        if field[1] == "unknown":
            name = name[:MAX_PATH]
            return invalid(f"{name} is not a field that is served here", name, "unknown_field")
        return invalid(f"{name} is required", name, "missing_field")
    if not path:
        return invalid(f"the body must be a JSON object: {reason}", code="invalid_type")
    bound = re.fullmatch(r"Expected `(?:int|float)` (<=|<|>=|>) (-?[0-9.e+-]+)", reason)
    if bound:
        text = f"{path} must be {BOUNDS[bound[1]]} {float(bound[2]):.12g}"
        return invalid(text, path, "out_of_range")
    reason = reason[0].lower() + reason[1:MAX_PATH]
    if reason.startswith("invalid ") and (values := allowed_values(kind, path)):
        reason += f"; it must be {' or '.join(filter(None, (', '.join(values[:-1]), values[-1])))}"
    return invalid(f"{path}: {reason}", path, "invalid_type")


def refuse_unserved(request: msgspec.Struct, harmless: dict[str, tuple[Any, ...]]) -> None:
    """Raise when a field that is not served asks for something; `harmless` holds values that do not.

    Raises:
        ApiError: 400 with the field's name.
    """
    for name in request.__struct_fields__:
        value = getattr(request, name)
        if value is None or name not in harmless:
            continue
        if not any(value == good and same_kind(value, good) for good in harmless[name]):
            raise invalid(f"{name} is not served (leave it out)", name, "unsupported_parameter")


def same_kind(value: object, other: object) -> bool:
    """Tell whether both are booleans or neither is: in Python, 0 equals False."""
    return isinstance(value, bool) == isinstance(other, bool)
