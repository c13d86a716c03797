# SPDX-License-Identifier: Apache-2.0
"""Incremental reader of one tool call written as a JSON object with a name and arguments."""

from __future__ import annotations

import enum
import json
from collections.abc import Collection

from mizzen.gateway.tools.json_scanner import ValueScanner, skip_whitespace

NAME_KEYS = ("name", "tool_name")
"""Keys that may hold the name; Cohere's models write the second one."""
ARGUMENT_KEYS = ("arguments", "parameters")
"""Keys that may hold the arguments; models write one or the other, and the reader accepts both."""
CALL_KEYS = (*NAME_KEYS, *ARGUMENT_KEYS, "type", "id", "call_id", "tool_call_id", "index")
"""Keys that a call may have. If any other key precedes the name or the arguments, the object is content."""


class _CallState(enum.Enum):
    OPEN = 0
    """Before the opening brace."""
    KEY = 1
    """Before a key."""
    IN_KEY = 2
    COLON = 3
    VALUE = 4
    """Before a value."""
    IN_VALUE = 5
    STREAMING = 6
    """Within arguments, whose text is returned as it arrives."""
    COMMA = 7
    """After a value."""
    END = 8


class CallReader:
    """Incremental reader of a call `{"name": …, "arguments": {…}}`, with `CALL_KEYS` in any order.

    The call starts once its name is that of a tool and its arguments are known to be an object; until then,
    the text may turn out to be content. After that, the text remains a call: the arguments are returned as
    they arrive. The call is complete once its arguments are complete, whatever follows them.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._state = _CallState.OPEN
        self._scanner = ValueScanner()
        self._value_text: list[str] = []
        self._raw: list[str] = []
        self._key = ""
        self._arguments: str | None = None
        self._new_arguments: list[str] = []
        self.name: str | None = None
        """Name of the called tool; None until it has been read."""
        self.started = False
        """True if the text is certain to be a call."""
        self.failed = False
        """True if the text is not a call; `raw` then holds the text that was read."""

    @property
    def ended(self) -> bool:
        """True if the object has ended or the text is not a call."""
        return self._state is _CallState.END or self.failed

    @property
    def arguments_complete(self) -> bool:
        """True if the arguments of a started call are complete, even if the object has not ended."""
        return self._state is not _CallState.STREAMING

    @property
    def raw(self) -> str:
        """Text read before the call started, or before the text turned out not to be a call."""
        return "".join(self._raw)

    def add(self, text: str) -> tuple[str, str]:
        """Read more text; return the new text of the arguments, and the text after the object."""
        at = 0
        while at < len(text) and not self.ended:
            at = self._step(text, at)
        if not self.started:
            self._raw.append(text[:at])
        new_arguments, self._new_arguments = "".join(self._new_arguments), []
        return new_arguments, text[at:]

    def complete(self) -> tuple[str, str]:
        """Leave the call incomplete: how its JSON would go on is unknown."""
        return "", ""

    def _step(self, text: str, at: int) -> int:
        """Read the object's next element, from index `at` on; return the index after the text read."""
        state = self._state
        if state is _CallState.STREAMING:
            end = self._scanner.scan(text, at)
            self._new_arguments.append(text[at:end])
            if self._scanner.done:
                self._state = _CallState.COMMA
            return end
        if state in (_CallState.IN_KEY, _CallState.IN_VALUE):
            end = self._scanner.scan(text, at)
            self._value_text.append(text[at:end])
            if self._scanner.done:
                self._end_value("".join(self._value_text))
            return end
        at = skip_whitespace(text, at)
        return at if at == len(text) else self._read_between(text[at], at)

    def _read_between(self, character: str, at: int) -> int:
        """Read a character outside keys and values, at index `at`; return the index to continue at."""
        state = self._state
        if state is _CallState.OPEN and character == "{":
            self._state = _CallState.KEY
        elif state is _CallState.KEY and character == '"':
            return self._begin_value(_CallState.IN_KEY, at)
        elif state is _CallState.COLON and character == ":":
            self._state = _CallState.VALUE
        elif state is _CallState.VALUE:
            streams = self._key in ARGUMENT_KEYS and self.name is not None and character == "{"
            if streams and not self.started:
                self.started = True
                return self._begin_value(_CallState.STREAMING, at)
            return self._begin_value(_CallState.IN_VALUE, at)
        elif state is _CallState.COMMA and character == ",":
            self._state = _CallState.KEY
        elif state in (_CallState.COMMA, _CallState.KEY) and character == "}":
            self._end_object()
            return at + 1
        elif self.started:  # a call without its closing brace is still a call
            self._state = _CallState.END
        else:
            self.failed = True
        return at if self.ended or state is _CallState.VALUE else at + 1

    def _begin_value(self, state: _CallState, at: int) -> int:
        self._state, self._scanner, self._value_text = state, ValueScanner(), []
        return at

    def _end_value(self, value_text: str) -> None:
        if self._state is _CallState.IN_KEY:
            self._key, self._state = self._decode(value_text, str) or "", _CallState.COLON
            self.failed = self.failed or (not self.started and self._key not in CALL_KEYS)
            return
        self._state = _CallState.COMMA
        if self._key in NAME_KEYS and self.name is None:
            name = self._decode(value_text, str)
            self.name = name if name in self._names else None
            self.failed = self.failed or self.name is None
        elif self._key in ARGUMENT_KEYS and self._arguments is None and not self.started:
            self._arguments = self._parse_object(value_text)
            self.failed = self.failed or self._arguments is None
        if self.name is not None and self._arguments is not None and not self.started:
            self.started = True
            self._new_arguments.append(self._arguments)

    def _end_object(self) -> None:
        """Handle the closing brace; if the call has no arguments, they become an empty object."""
        self._state = _CallState.END
        if self.started:
            return
        if self.name is None:
            self.failed = True
            return
        self.started = True
        self._new_arguments.append("{}")

    def _decode(self, value_text: str, kind: type) -> str | None:
        try:
            value = json.loads(value_text, strict=False)
        except (ValueError, RecursionError):
            self.failed = self.failed or not self.started
            return None
        return value if isinstance(value, kind) else None

    def _parse_object(self, value_text: str) -> str | None:
        """Return the JSON text of the arguments; None if they are not an object.

        Two other forms that some models write are accepted: a JSON string that holds an object, and null,
        which means an empty object.
        """
        if value_text.startswith("{"):
            return value_text
        if value_text == "null":
            return "{}"
        inner = self._decode(value_text, str)
        try:
            if inner is None or not isinstance(json.loads(inner), dict):
                return None
            inner.encode()  # fails on an unpaired surrogate, which JSON allows but UTF-8 does not
            return inner
        except (ValueError, RecursionError):
            return None
