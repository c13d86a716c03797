# SPDX-License-Identifier: Apache-2.0
"""Remove unknown fields from a JSON body, and list them.

Unknown values are never decoded: msgspec only checks their syntax and skips them.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import msgspec
from msgspec import Raw

from mizzen.gateway.errors import invalid
from mizzen.gateway.fields.ignored import MAX_PATHS, MORE, safe_name
from mizzen.gateway.fields.rules import Rules, unsupported_field
from mizzen.gateway.fields.shapes import ObjectShape, Shape

MAX_FIELDS = 500_000
"""Maximum number of fields of a body with unknown fields, not counting the fields within unknown values."""


MAX_NEUTRAL_BYTES = 64
"""Maximum size of a refused field's value that is decoded, because the value may ask for nothing."""


class FieldName(str):
    """Name of a field in a decoded object."""

    __slots__ = ()


UNNAMED = FieldName(MORE)
"""Key that holds the last of an object's unknown fields beyond the first `MAX_PATHS` ones."""


class FieldScanner:
    """Scanner of one JSON body; `ignored` collects the paths of its unknown fields that are not null."""

    def __init__(self, rules: Rules) -> None:
        """Create a scanner; `rules` names the unknown fields of the outermost object that are refused."""
        self.ignored: dict[str, None] = {}
        self._rules = rules
        self._fields = 0
        self._known: Container[str] = ()
        self._unknown: set[str] = set()
        self._objects = msgspec.json.Decoder(dict[FieldName, Raw], dec_hook=self._field_name)
        self._lists = msgspec.json.Decoder(list[Raw])

    def remove_unknown(self, value: Raw, shape: Shape | None, path: str = "") -> Raw:
        """Return a JSON value without its unknown fields; `path` leads to the value.

        Raises:
            ApiError: 400 if the value has more than `MAX_FIELDS` fields, or a field that is refused.
            msgspec.DecodeError: the value is not valid JSON.
            RecursionError: the value is nested too deeply.
        """
        first = bytes(memoryview(value)[:1])
        if shape is None or first not in (b"[", b"{"):
            return value
        if first == b"{":
            return self._remove_from_object(value, shape.objects, path) if shape.objects else value
        if shape.item is None:
            return value
        items: list[Raw] = self._lists.decode(value)
        kept = [self.remove_unknown(item, shape.item, f"{path}[]") for item in items]
        changed = any(new is not old for new, old in zip(kept, items, strict=True))
        return Raw(msgspec.json.encode(kept)) if changed else value

    def _remove_from_object(self, value: Raw, objects: tuple[ObjectShape, ...], path: str) -> Raw:
        self._known = (
            objects[0].fields if len(objects) == 1 else {name for kind in objects for name in kind.fields}
        )
        self._unknown = set()
        members: dict[FieldName, Raw] = self._objects.decode(value)
        kind = choose_object(objects, members)
        if kind is None:
            return value  # the decoder rejects the tag
        kept: dict[str, Raw] = {}
        changed = False
        for name, member in members.items():
            if name not in kind.fields:
                changed = True
                self._ignore(member, MORE if name is UNNAMED else join_path(path, safe_name(name)))
                continue
            shape = kind.fields[name]
            kept[name] = (
                member if shape is None else self.remove_unknown(member, shape, join_path(path, name))
            )
            changed = changed or kept[name] is not member
        return Raw(msgspec.json.encode(kept)) if changed else value

    def _ignore(self, value: Raw, path: str) -> None:
        """Add the path of an unknown field to the ignored ones, unless the field is null or refused."""
        if bytes(memoryview(value)[:1]) == b"n":
            return
        rule = self._rules.get(path)
        if rule is not None:
            small = bytes(memoryview(value)[: MAX_NEUTRAL_BYTES + 1])
            if len(small) > MAX_NEUTRAL_BYTES or not rule.is_neutral(msgspec.json.decode(small)):
                raise unsupported_field(path, rule.reason)
        elif len(self.ignored) <= MAX_PATHS:
            self.ignored[path] = None

    def _field_name(self, _: type, name: str) -> FieldName:
        """Convert a key for msgspec; the keys of too many unknown fields become one key."""
        self._fields += 1
        if self._fields > MAX_FIELDS:
            text = f"the body holds fields that are not supported, and more than {MAX_FIELDS} fields in total"
            raise invalid(text, code="body_too_complex")
        if name in self._known or name in self._rules:
            return FieldName(name)
        if name in self._unknown or len(self._unknown) < MAX_PATHS:
            self._unknown.add(name)
            return FieldName(name)
        return UNNAMED


def join_path(path: str, name: str) -> str:
    """Return the path of a field in the object at `path`."""
    return f"{path}.{name}" if path else name


def choose_object(objects: tuple[ObjectShape, ...], members: dict[FieldName, Raw]) -> ObjectShape | None:
    """Return the shape of an object with these members; None if its tag is missing or matches no shape."""
    if len(objects) == 1:
        return objects[0]
    for kind in objects:
        tag = members.get(FieldName(kind.tag_field or ""))
        if tag is not None and bytes(tag) == msgspec.json.encode(kind.tag):
            return kind
    return None


def remove_unknown_fields(
    body: bytes | Raw, shape: Shape | None, rules: Rules
) -> tuple[Raw, tuple[str, ...]]:
    """Return a JSON body without its unknown fields, and the paths of the unknown fields that are not null.

    `rules` names the unknown fields of the outermost object that are refused.

    Raises:
        ApiError: 400 if the body has too many fields, or a field that is refused.
        msgspec.DecodeError: the body is not valid JSON.
        RecursionError: the body is nested too deeply.
    """
    scanner = FieldScanner(rules)
    raw: Any = body if isinstance(body, Raw) else Raw(body.lstrip())
    return scanner.remove_unknown(raw, shape), tuple(scanner.ignored)
