"""Reads one call as it comes: a JSON object with a name and arguments."""

from __future__ import annotations

import enum
import json
from collections.abc import Collection

from mizzen.gateway.tools.json_scanner import ValueScanner, skip_whitespace

NAME_KEY = "name"
ARGUMENT_KEYS = ("arguments", "parameters")
"""Families differ in the key; both are read in all of them."""
CALL_KEYS = (NAME_KEY, *ARGUMENT_KEYS, "type", "id", "call_id", "index")
"""Keys of calls. An object that begins with another is none, and need not be held back to its end."""


class _State(enum.Enum):
    OPEN = 0
    """Before the brace."""
    KEY = 1
    """Before a key."""
    IN_KEY = 2
    COLON = 3
    VALUE = 4
    """Before a value."""
    IN_VALUE = 5
    STREAMING = 6
    """In the arguments, which are given on as they come."""
    COMMA = 7
    """Behind a value."""
    END = 8


class CallReader:
    """Reads `{"name": …, "arguments": {…}}`, in any order and with the further keys that calls have.

    A call begins once the name is known to be one of the tools and the arguments are known to be an object;
    until then, what is no call can still be taken as text. From then on nothing is taken back: arguments are
    given on as they are written, and the call ends where their brackets do.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._state = _State.OPEN
        self._scanner = ValueScanner()
        self._part: list[str] = []
        self._raw: list[str] = []
        self._key = ""
        self._arguments: str | None = None
        self._given: list[str] = []
        self.name: str | None = None
        """The tool's name, once it is known."""
        self.started = False
        """Whether this is a call for certain."""
        self.failed = False
        """Whether this is no call; `raw` holds what was read."""

    @property
    def ended(self) -> bool:
        """Whether the object has ended, or was none."""
        return self._state is _State.END or self.failed

    @property
    def whole(self) -> bool:
        """Whether the arguments of a call that has begun are all there; the object need not have ended."""
        return self._state is not _State.STREAMING

    @property
    def raw(self) -> str:
        """What was read, as long as no call has begun."""
        return "".join(self._raw)

    def add(self, text: str) -> tuple[str, str]:
        """Read on; return new text of the arguments, and what lies behind the object."""
        at = 0
        while at < len(text) and not self.ended:
            at = self._step(text, at)
        if not self.started:
            self._raw.append(text[:at])
        given, self._given = "".join(self._given), []
        return given, text[at:]

    def _step(self, text: str, at: int) -> int:
        """Read one part of the object from `text[at:]`; return the index behind it."""
        state = self._state
        if state is _State.STREAMING:
            end = self._scanner.take(text, at)
            self._given.append(text[at:end])
            if self._scanner.done:
                self._state = _State.COMMA
            return end
        if state in (_State.IN_KEY, _State.IN_VALUE):
            end = self._scanner.take(text, at)
            self._part.append(text[at:end])
            if self._scanner.done:
                self._end_part("".join(self._part))
            return end
        at = skip_whitespace(text, at)
        return at if at == len(text) else self._between(text[at], at)

    def _between(self, character: str, at: int) -> int:
        """Read a character between keys and values."""
        state = self._state
        if state is _State.OPEN and character == "{":
            self._state = _State.KEY
        elif state is _State.KEY and character == '"':
            return self._begin_part(_State.IN_KEY, at)
        elif state is _State.COLON and character == ":":
            self._state = _State.VALUE
        elif state is _State.VALUE:
            streams = self._key in ARGUMENT_KEYS and self.name is not None and character == "{"
            if streams and not self.started:
                self.started = True
                return self._begin_part(_State.STREAMING, at)
            return self._begin_part(_State.IN_VALUE, at)
        elif state is _State.COMMA and character == ",":
            self._state = _State.KEY
        elif state in (_State.COMMA, _State.KEY) and character == "}":
            self._end()
            return at + 1
        elif self.started:  # a call whose last brace is missing is a call all the same
            self._state = _State.END
        else:
            self.failed = True
        return at if self.ended or state is _State.VALUE else at + 1

    def _begin_part(self, state: _State, at: int) -> int:
        self._state, self._scanner, self._part = state, ValueScanner(), []
        return at

    def _end_part(self, part: str) -> None:
        if self._state is _State.IN_KEY:
            self._key, self._state = self._decoded(part, str) or "", _State.COLON
            self.failed = self.failed or (not self.started and self._key not in CALL_KEYS)
            return
        self._state = _State.COMMA
        if self._key == NAME_KEY and self.name is None:
            name = self._decoded(part, str)
            self.name = name if name in self._names else None
            self.failed = self.failed or self.name is None
        elif self._key in ARGUMENT_KEYS and self._arguments is None and not self.started:
            self._arguments = self._object(part)
            self.failed = self.failed or self._arguments is None
        if self.name is not None and self._arguments is not None and not self.started:
            self.started = True
            self._given.append(self._arguments)

    def _end(self) -> None:
        """Take the closing brace: a call without arguments has empty ones."""
        self._state = _State.END
        if self.started:
            return
        if self.name is None:
            self.failed = True
            return
        self.started = True
        self._given.append("{}")

    def _decoded(self, part: str, kind: type) -> str | None:
        try:
            value = json.loads(part, strict=False)
        except (ValueError, RecursionError):
            self.failed = self.failed or not self.started
            return None
        return value if isinstance(value, kind) else None

    def _object(self, part: str) -> str | None:
        """Return arguments as the text of an object; some models write that text as a string, or null."""
        if part.startswith("{"):
            return part
        if part == "null":
            return "{}"
        inner = self._decoded(part, str)
        try:
            if inner is None or not isinstance(json.loads(inner), dict):
                return None
            inner.encode()  # half a character, which JSON can name, is no text that could be given on
            return inner
        except (ValueError, RecursionError):
            return None
