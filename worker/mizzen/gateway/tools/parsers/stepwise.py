# SPDX-License-Identifier: Apache-2.0
"""Base of readers of a tool call whose arguments are not JSON: they are converted to JSON one by one."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from mizzen.gateway.tools.parser_base import ArgumentSchemas


class StepwiseCallReader(ABC):
    """Base of readers that read a call in steps, with the interface of `CallReader`.

    `_step` is the next step. A step reads some of the text, and returns the text that is left and whether to
    continue with it. It returns False if it needs more text. The first step is `_read_name`.
    """

    def __init__(self, tools: ArgumentSchemas) -> None:
        self._tools = tools
        self._step = self._read_name
        self._pending = self._raw = ""
        self._new_arguments: list[str] = []
        self._properties: Mapping[str, Any] = {}
        self._keys: set[str] = set()
        """Keys of the arguments so far."""
        self.name: str | None = None
        self.started = False
        self.failed = False
        self.ended = False

    @property
    def arguments_complete(self) -> bool:
        """True if the arguments are complete."""
        return self.ended

    @property
    def raw(self) -> str:
        """Text read before the call started, or before the text turned out not to be a call."""
        return self._raw + self._pending

    def add(self, text: str) -> tuple[str, str]:
        """Read more text; return the new text of the arguments, and the text after the call."""
        text, self._pending = self._pending + text, ""
        more = True
        while more and not self.ended:
            text, more = self._step(text)
        if not self.ended:
            self._pending, text = text, ""
        new_arguments, self._new_arguments = "".join(self._new_arguments), []
        return new_arguments, text

    @abstractmethod
    def _read_name(self, text: str) -> tuple[str, bool]:
        """Read the name of the tool, and call `_set_tool`; or call `_fail`."""

    def _set_tool(self, name: str) -> None:
        """Set the tool of the call, and the schemas of its arguments."""
        self.name = name
        self._properties = property_schemas(self._tools[name])

    def _key_as_json(self, key: str) -> str:
        """Return the text that precedes the value of the next argument in the JSON object of arguments."""
        separator = ", " if self._keys else "{"
        return f"{separator}{json.dumps(key, ensure_ascii=False)}: "

    def _end_call(self, rest: str) -> tuple[str, bool]:
        """End the call; `rest` is the text after it."""
        self.started, self.ended, self._raw = True, True, ""
        self._new_arguments.append("}" if self._keys else "{}")
        return rest, False

    def _fail(self, text: str, cut: int) -> tuple[str, bool]:
        """End the reading: the first `cut` characters show that the text is not a call."""
        self.failed = self.ended = True
        self._raw += text[:cut]
        return text[cut:], False


def property_schemas(schema: Any) -> Mapping[str, Any]:
    """Return the schemas of the properties that an object schema describes, by property name."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}
