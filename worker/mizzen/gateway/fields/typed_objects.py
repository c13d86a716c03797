# SPDX-License-Identifier: Apache-2.0
"""Decode JSON objects whose field `type` determines their other fields, such as items and tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from mizzen.gateway.errors import ApiError, invalid
from mizzen.gateway.fields.decoder import BodyDecoder
from mizzen.gateway.fields.rules import Rules
from mizzen.gateway.requests.decode_body import json_error


class ObjectType(msgspec.Struct):
    """An object whose other fields are skipped."""

    type: Any = UNSET


class TypedObjects:
    """Decoder of objects of several types; errors name the object's path in the request body."""

    def __init__(
        self,
        types: Mapping[str, type[msgspec.Struct]],
        rules: Mapping[str, Rules] | None = None,
        *,
        strict: bool,
        default: str | None = None,
    ) -> None:
        """Create a decoder.

        Args:
            types: The struct of each type.
            rules: Rules for a type's unused fields; see `BodyDecoder`.
            strict: True to reject unknown fields that are not null.
            default: Type of objects without a type.
        """
        self._default = default
        self._types = msgspec.json.Decoder(ObjectType)
        self._decoders = {
            kind: BodyDecoder(struct, (rules or {}).get(kind), strict=strict, accept_null=True)
            for kind, struct in types.items()
        }

    def kind_of(self, raw: Raw, path: str) -> Any:
        """Return the type of the object at `path`; the default if it has none.

        Raises:
            ApiError: 400 if the value is not an object.
        """
        try:
            kind = self._types.decode(raw).type
        except msgspec.ValidationError:
            raise invalid(f"{path} must be a JSON object", path, "invalid_type") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise nest_error(json_error(bytes(raw), error), path) from None
        return self._default if kind is UNSET else kind

    def decode(self, raw: Raw, kind: str, path: str) -> tuple[msgspec.Struct, tuple[str, ...]]:
        """Return the decoded object at `path`, and the paths of its ignored fields within it.

        Raises:
            ApiError: 400 if a field is invalid or not supported; the error names it.
        """
        try:
            return self._decoders[kind].decode(raw)
        except ApiError as error:
            raise nest_error(error, path) from None


def nest_error(error: ApiError, path: str) -> ApiError:
    """Convert an error about an object to one about the request: prefix its field with the object's path."""
    field = f"{path}.{error.param}" if error.param else path
    message = error.message.removeprefix(error.param or "the body").removeprefix(":")
    return invalid(f"{field}{':' if error.param else ''} {message.strip()}", field, error.code)
