# SPDX-License-Identifier: Apache-2.0
"""Decode request bodies, and list the fields that are ignored."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec
from msgspec import Raw

from mizzen.gateway.fields.ignored import collect_paths
from mizzen.gateway.fields.rules import Rules, apply_rules
from mizzen.gateway.fields.scan import remove_unknown_fields
from mizzen.gateway.fields.shapes import shape_of_type
from mizzen.gateway.requests.decode_body import INTEGER_EXPECTED, decode_body, json_error

R = TypeVar("R", bound=msgspec.Struct)
UNKNOWN_FIELD = "Object contains unknown field"


class BodyDecoder(Generic[R]):
    """Decoder of one type of JSON object, whose structs must forbid unknown fields.

    Bodies without unknown fields are decoded in one pass. Only other bodies are scanned for unknown fields;
    these are removed, and the remaining body is decoded with all its checks.
    """

    def __init__(
        self,
        kind: type[R],
        rules: Rules | None = None,
        *,
        strict: bool = False,
        accept_null: bool = False,
    ) -> None:
        """Create a decoder.

        Args:
            kind: Type of the object.
            rules: Rules for known fields that are not used. If the type does not have a field, its rule must
                refuse it; the rule does not apply with `strict`, because then the field is unknown.
            strict: True to reject unknown fields, and fields that only advise.
            accept_null: True to accept unknown fields that are null even if `strict`.
        """
        self._decoder = msgspec.json.Decoder(kind)
        rules = rules or {}
        known = {path for path in rules if path.split(".")[0] in kind.__struct_fields__}
        self._rules = {path: rules[path] for path in rules if path in known}
        self._foreign_rules = {path: rules[path] for path in rules if path not in known}
        self._strict = strict
        self._accept_null = accept_null

    def decode(self, body: bytes | Raw) -> tuple[R, tuple[str, ...]]:
        """Return the decoded object, and the paths of its fields that are ignored.

        Raises:
            ApiError: 400 if the body is not valid JSON, has a field that is invalid or not supported, or
                lacks a required field; the error names the field.
        """
        unknown: tuple[str, ...] = ()
        try:
            request = self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if is_repairable(error) and not (self._strict and not self._accept_null):
                kept, unknown = self._remove_unknown(body)
                body = body if self._strict and unknown else kept
            request = decode_body(self._decoder, body)
        return request, collect_paths(unknown, apply_rules(request, self._rules, strict=self._strict))

    def _remove_unknown(self, body: bytes | Raw) -> tuple[bytes | Raw, tuple[str, ...]]:
        try:
            return remove_unknown_fields(body, shape_of_type(self._decoder.type), self._foreign_rules)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise json_error(bytes(body), error) from None


def is_repairable(error: Exception) -> bool:
    """Return whether a body may be valid apart from unknown fields and integers written as floats."""
    return isinstance(error, msgspec.ValidationError) and (
        str(error).startswith(UNKNOWN_FIELD) or INTEGER_EXPECTED.match(str(error)) is not None
    )
