"""Mistral's tool calls, which follow `[TOOL_CALLS]`, and the plain list of calls that a grammar can force."""

from __future__ import annotations

import re
from collections.abc import Collection

from mizzen.gateway.tools.json_scanner import ValueScanner, skip_whitespace
from mizzen.gateway.tools.parser_base import MarkerParser

MARKER, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MAX_HEAD = 256
"""Maximum number of characters that may precede the arguments of a call."""
_HEAD = re.compile(r"([\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*", re.ASCII)
_NAME_START = re.compile(r"[\w.-]", re.ASCII)


class NamedCallReader:
    """Reader of a call `name{…}` or `name[CALL_ID]…[ARGS]{…}`, with the interface of `CallReader`."""

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
        if not self.started:
            brace = text.find("{", 0, MAX_HEAD - len(self._head))
            at = brace if brace >= 0 else min(len(text), MAX_HEAD - len(self._head))
            self._head += text[:at]
            if brace >= 0:
                self._begin()
            else:
                self.failed = len(self._head) == MAX_HEAD
            if not self.started:
                return "", text[at:]
        end = self._scanner.scan(text, at)
        return text[at:end], text[end:]

    def complete(self) -> tuple[str, str]:
        """Leave the call incomplete: how its JSON would go on is unknown."""
        return "", ""

    def _begin(self) -> None:
        head = _HEAD.fullmatch(self._head)
        self.name = head[1] if head is not None and head[1] in self._names else None
        self.started = self.name is not None
        self.failed = not self.started


class BareListParser(MarkerParser):
    """Parser of output that is a JSON list of calls, or a single call."""

    def __init__(self, names: Collection[str], stop: tuple[str, ...] = ()) -> None:
        super().__init__(names, stop)
        self._in_calls = not self.markers
        self._in_list = False
        self._opening = ""
        """Text read since a marker or the start of a list; it becomes content if no call follows."""

    def _parse_between_calls(self, text: str) -> str:
        if not self._in_calls:
            marker, rest = self._content_until_marker(text)
            self._in_calls = marker == MARKER
            return rest
        at = skip_whitespace(text, 0)
        if at and (self._opening or (self.markers and not self._in_list)):
            self._opening += text[:at]
        elif at:
            self._output.add_content(text[:at])
        if at:
            return text[at:]
        for marker in self.markers:
            if text.startswith(marker):
                return text[len(marker) :]
        if any(marker.startswith(text) for marker in self.markers):
            self._pending = text
            return ""
        return self._in_call_list(text)

    def _in_call_list(self, text: str) -> str:
        first = text[0]
        if first == "{":
            self._expect_object()
            return text
        if first == "[" and not self._in_list:
            self._in_list, self._opening = True, self._opening + first
            return text[1:]
        if self._in_list and not self._opening and first in ",]":
            self._in_calls = self._in_list = first == ","
            return text[1:]
        if self.markers and not self._in_list and _NAME_START.match(first):
            self._reader = NamedCallReader(self._names)
            return text
        self._add_content("")
        self._in_calls = self._in_list = False
        return text

    def _call_ended(self, failed: bool) -> None:
        self._in_calls = self._in_list = self._in_list and not failed
        self._opening = ""

    def _add_content(self, text: str) -> None:
        """Add to the content the text that might have opened a call, and then `text`, which is not a call."""
        super()._add_content(self._opening + text)
        self._opening = ""


class MistralParser(BareListParser):
    """Parser of `[TOOL_CALLS]` followed by a list of JSON objects, or by calls that begin with a name."""

    markers = (MARKER, CALL_ID, ARGUMENTS)
