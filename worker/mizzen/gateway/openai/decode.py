"""From bytes to request objects; everything that is wrong with a body is named here."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.openai.values import allowed_values

R = TypeVar("R")

BOUNDS = {"<=": "at most", "<": "below", ">=": "at least", ">": "above"}


def decode(decoder: msgspec.json.Decoder[R], body: bytes) -> R:
    """Return the request in a body.

    Raises:
        ApiError: 400, which names the field and what is wrong with it.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None


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
            return invalid(f"{name} is not a field that is served here", name, "unknown_field")
        return invalid(f"{name} is required", name, "missing_field")
    if not path:
        return invalid(f"the body must be a JSON object: {reason}", code="invalid_type")
    bound = re.fullmatch(r"Expected `(?:int|float)` (<=|<|>=|>) (-?[0-9.e+-]+)", reason)
    if bound:
        text = f"{path} must be {BOUNDS[bound[1]]} {float(bound[2]):.12g}"
        return invalid(text, path, "out_of_range")
    reason = reason[0].lower() + reason[1:]
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
