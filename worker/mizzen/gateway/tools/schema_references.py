# SPDX-License-Identifier: Apache-2.0
"""Definitions that the references of a JSON schema point to.

A reference may point anywhere into its schema, also to a place that holds no definitions, such as
`#/components/schemas/Pet`. `SchemaReferences` adds a definition in `$defs` for each such target.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from mizzen.common.json_schema import Schema, resolve_pointer

MAX_TARGETS = 1000
"""Maximum number of targets that become definitions; references to further targets are not enforced."""
PLAIN_FOLDERS = ("$defs", "definitions")


class SchemaReferences:
    """References of one schema. `targets` grows while references are renamed."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._anchors: dict[str, Any] | None = None
        self._names: dict[str, str] = {}
        """Names of the new definitions by reference."""
        self.targets: list[tuple[str, Any]] = []
        """Names of the new definitions, and the schemas that they hold."""

    def rename(self, reference: Any) -> str | None:
        """Return the reference under which an engine finds the target; None if there is no such target."""
        if not isinstance(reference, str) or not self._leads_to_value(reference):
            return None
        if reference == "#" or self._is_plain(reference):
            return reference
        name = self._names.get(reference)
        if name is None:
            if len(self.targets) >= MAX_TARGETS:
                return None
            name = self._names[reference] = self._new_name()
            self.targets.append((name, self.find(reference)))
        return f"#/$defs/{name}"

    def find(self, reference: str) -> Any:
        """Return the schema that a reference points to; None if it points to no schema."""
        own = self._root.get("$id") if isinstance(self._root, dict) else None
        if isinstance(own, str) and own:
            reference = reference.removeprefix(own) or "#"
        pointer = unquote(reference)
        if not pointer.startswith("#"):
            return None
        if pointer == "#" or pointer.startswith("#/"):
            target = resolve_pointer(self._root, reference)
        else:
            target = self._anchored().get(pointer[1:])
        return target if isinstance(target, dict | bool) else None

    def _leads_to_value(self, reference: str) -> bool:
        """Return whether a reference leads to a schema, and not in a circle of references."""
        seen = set[str]()
        while reference not in seen:
            seen.add(reference)
            target = self.find(reference)
            if not isinstance(target, dict) or not isinstance(target.get("$ref"), str):
                return target is not None
            reference = target["$ref"]
        return False

    def _is_plain(self, reference: str) -> bool:
        """Return whether a reference points to a definition with a plain name, which stays where it is."""
        steps = reference.split("/")
        return len(steps) == 3 and steps[1] in PLAIN_FOLDERS and not set(steps[2]) & set("~%")

    def _new_name(self) -> str:
        taken = self._root.get("$defs") if isinstance(self._root, dict) else None
        number = len(self.targets) + 1
        while isinstance(taken, dict) and f"target{number}" in taken:
            number += MAX_TARGETS
        return f"target{number}"

    def _anchored(self) -> dict[str, Any]:
        if self._anchors is None:
            self._anchors = {part["$anchor"]: part for part in _objects(self._root) if _has_anchor(part)}
        return self._anchors


def _has_anchor(part: Schema) -> bool:
    return isinstance(part.get("$anchor"), str)


def _objects(value: Any) -> Iterator[Schema]:
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
