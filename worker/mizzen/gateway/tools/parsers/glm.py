"""Tool calls of GLM-4: a line with the name of a tool, and then a JSON object with the arguments.

    weather
    {"city": "Köln"}

A call is at the start of the output, after another call, or after `<|assistant|>`.
"""

from __future__ import annotations

from collections.abc import Collection

from mizzen.gateway.tools.json_scanner import WHITESPACE, ValueScanner, skip_whitespace
from mizzen.gateway.tools.parser_base import ArgumentSchemas, MarkerParser

ASSISTANT, OBSERVATION = "<|assistant|>", "<|observation|>"
MAX_SPACE = 16
"""Maximum number of white space characters between a name and its arguments."""


class NameLineReader:
    """Reader of a call `name\\n{…}`, with the interface of `CallReader`.

    The text turns out not to be a call at the first character at which it differs from all calls, so little
    of it is held back.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._head = ""
        self._scanner = ValueScanner()
        self.name: str | None = None
        self.started = False
        self.failed = False

    @property
    def ended(self) -> bool:
        """True if the arguments have ended or the text is not a call."""
        return self.failed or self._scanner.done

    @property
    def arguments_complete(self) -> bool:
        """True if the arguments are complete."""
        return self._scanner.done

    @property
    def raw(self) -> str:
        """Text read before the arguments, or before the text turned out not to be a call."""
        return self._head

    def add(self, text: str) -> tuple[str, str]:
        """Read more text; return the new text of the arguments, and the text after the call."""
        at = 0
        while at < len(text) and not self.started and not self.failed:
            at = self._read_head(text[at], at)
        if not self.started:
            return "", text[at:]
        end = self._scanner.scan(text, at)
        return text[at:end], text[end:]

    def complete(self) -> tuple[str, str]:
        """Leave the call incomplete: how its JSON would go on is unknown."""
        return "", ""

    def _read_head(self, character: str, at: int) -> int:
        """Read a character before the arguments, at index `at`; return the index to continue at."""
        name = self._head.rstrip(WHITESPACE)
        space = self._head[len(name) :]
        if character == "{" and "\n" in space and name in self._names:
            self.name, self.started = name, True
            return at
        if character in WHITESPACE:
            possible = name in self._names and len(space) < MAX_SPACE
        else:
            longer = name + character
            possible = not space and any(known.startswith(longer) for known in self._names)
        if not possible:
            self.failed = True
            return at
        self._head += character
        return at + 1


class GlmParser(MarkerParser):
    """Parser of calls that begin with a line that is the name of a tool."""

    markers = (ASSISTANT, OBSERVATION)

    def __init__(self, tools: ArgumentSchemas, stop: tuple[str, ...] = ()) -> None:
        super().__init__(tools, stop)
        self._expecting = True

    def _parse_between_calls(self, text: str) -> str:
        if not self._expecting:
            marker, rest = self._content_until_marker(text)
            self._expecting = marker == ASSISTANT
            return rest
        at = skip_whitespace(text, 0)
        if at:
            self._output.add_content(text[:at])
            return text[at:]
        for marker in self.markers:
            if text.startswith(marker):
                return text[len(marker) :]
        if any(marker.startswith(text) for marker in self.markers):
            self._pending = text
            return ""
        self._reader = NameLineReader(self._names)
        return text

    def _call_ended(self, failed: bool) -> None:
        self._expecting = not failed
