# SPDX-License-Identifier: Apache-2.0
"""Common base of the tool call parsers of all families."""

from __future__ import annotations

import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from mizzen.gateway.requests.output import OutputDelta, ToolCallDelta
from mizzen.gateway.text.stop import StopStrings, partial_match_length
from mizzen.gateway.tools.call_reader import CallReader
from mizzen.gateway.tools.json_scanner import WHITESPACE

_ALPHABET = string.ascii_letters + string.digits

ArgumentSchemas = Mapping[str, Any]
"""JSON schemas of the tools' arguments by tool name."""


class ToolParser(Protocol):
    """Incremental parser of one output into content and tool calls.

    The result does not depend on how the text is divided among calls of `feed`.
    """

    def feed(self, text: str) -> OutputDelta:
        """Parse more text; return the new output that later text cannot change."""
        ...

    def end(self, *, cut_off: bool = False) -> OutputDelta:
        """Handle the end of the text; return the output that was held back.

        With `cut_off`, it was not the model that ended the text, so a call that is open stays incomplete.
        """
        ...

    @property
    def call_count(self) -> int:
        """Number of calls started so far."""
        ...

    @property
    def call_open(self) -> bool:
        """True if the arguments of the last call are incomplete."""
        ...

    @property
    def stopped(self) -> bool:
        """True if the content has reached a stop string; further text is ignored."""
        ...

    @property
    def stop_string(self) -> str | None:
        """Stop string that the content has reached; None if it has reached none."""
        ...


class ToolCallReader(Protocol):
    """Interface of readers of one tool call, such as `CallReader`."""

    name: str | None
    started: bool
    failed: bool

    @property
    def ended(self) -> bool:
        """True if the call has ended, or the text is not a call."""
        ...

    @property
    def arguments_complete(self) -> bool:
        """True if the arguments of a started call are complete, even if the call has not ended."""
        ...

    @property
    def raw(self) -> str:
        """Text read before the call started, or before the text turned out not to be a call."""
        ...

    def add(self, text: str) -> tuple[str, str]:
        """Read more text; return the new text of the arguments, and the text after the call."""
        ...

    def complete(self) -> tuple[str, str]:
        """End a started call at the end of the output, if its syntax allows that; return what `add` does."""
        ...


class OutputCollector:
    """Collector of the content and the calls that a parser finds.

    White space next to a call belongs to the syntax, not to the content. The search for stop strings includes
    white space that may still belong to a call: otherwise, endless blank lines would never complete a stop
    string of blank lines.
    """

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._stop = StopStrings(stop) if stop else None
        self._content: list[str] = []
        self._space: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._count = 0
        self._after_call = False

    @property
    def call_count(self) -> int:
        """Number of calls started so far."""
        return self._count

    @property
    def stopped(self) -> bool:
        """True if the content has reached a stop string."""
        return self.stop_string is not None

    @property
    def stop_string(self) -> str | None:
        """Stop string that the content has reached; None if it has reached none."""
        return None if self._stop is None else self._stop.matched

    def add_content(self, text: str) -> None:
        """Add text to the content; the first stop string and all text after it are dropped."""
        if self._after_call:
            text = text.lstrip(WHITESPACE)
            self._after_call = not text
        self._add(text if self._stop is None else self._stop.add(text))

    def _add(self, text: str) -> None:
        body = text.rstrip(WHITESPACE)
        if body:
            self._content += [*self._space, body]
            self._space = []
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def start_call(self, name: str, arguments: str) -> None:
        """Start a call; `arguments` is the beginning of its arguments' text."""
        self._release_pending()
        self._space, self._after_call = [], True
        self._calls.append(ToolCallDelta(self._count, new_call_id(), name))
        self._count += 1
        self.add_arguments(arguments)

    def add_arguments(self, text: str) -> None:
        """Add text to the arguments of the last call."""
        if text:
            self._calls.append(ToolCallDelta(self._count - 1, arguments=text))

    def end(self) -> None:
        """End the output: held-back text becomes content, but white space after a call is dropped."""
        self._release_pending()
        self._content += self._space
        self._space = []

    def _release_pending(self) -> None:
        """Add to the content the text that was held back because it might have begun a stop string."""
        if self._stop is not None:
            self._add(self._stop.flush())

    def take_delta(self) -> OutputDelta:
        """Return the output collected since the previous call of this method."""
        delta = OutputDelta("".join(self._content), tool_calls=tuple(self._calls))
        self._content, self._calls = [], []
        return delta


def new_call_id() -> str:
    """Return a new call id in OpenAI's form."""
    return "call_" + "".join(secrets.choice(_ALPHABET) for _ in range(24))


class MarkerParser(ABC):
    """Base of the families' tool parsers: a reader parses each call; the subclass parses all other text."""

    markers: tuple[str, ...] = ()
    """Strings that never become content."""

    def __init__(self, tools: ArgumentSchemas, stop: tuple[str, ...] = ()) -> None:
        self._tools = tools
        self._names = frozenset(tools)
        self._ignored: frozenset[str] = frozenset()
        """Names, besides those of the tools, of calls that are dropped."""
        self._output = OutputCollector(stop)
        self._reader: ToolCallReader | None = None
        self._pending = ""
        self._any_marker = re.compile("|".join(map(re.escape, self.markers)) or r"(?!)")

    @property
    def call_count(self) -> int:
        """Number of calls started so far."""
        return self._output.call_count

    @property
    def call_open(self) -> bool:
        """True if the arguments of the last call are incomplete."""
        reader = self._reader
        if reader is None or not reader.started or reader.name in self._ignored:
            return False
        return not reader.arguments_complete

    @property
    def stopped(self) -> bool:
        """True if the content has reached a stop string; further text is ignored."""
        return self._output.stopped

    @property
    def stop_string(self) -> str | None:
        """Stop string that the content has reached; None if it has reached none."""
        return self._output.stop_string

    def feed(self, text: str) -> OutputDelta:
        """Parse more text; return the new output that later text cannot change."""
        text, self._pending = self._pending + text, ""
        while text and not self.stopped:
            text = (
                self._parse_between_calls(text)
                if self._reader is None
                else self._read_call(self._reader, text)
            )
        return self._output.take_delta()

    def end(self, *, cut_off: bool = False) -> OutputDelta:
        """Handle the end of the text; return the output that was held back.

        A call that the model left open is completed if its syntax allows that, unless it was `cut_off`.
        """
        if self.call_open and self._reader is not None and not cut_off:
            new_arguments, rest = self._reader.complete()
            self._output.add_arguments(new_arguments)
            if self._reader.ended:
                self._reader = None
                self._add_content(rest)
        if self._reader is None or not self._reader.started:
            self._add_content(self._reader.raw if self._reader is not None else "")
        self._output.add_content(self._pending)
        self._pending = ""
        self._output.end()
        return self._output.take_delta()

    @abstractmethod
    def _parse_between_calls(self, text: str) -> str:
        """Parse at least the beginning of a text outside calls, and return the rest of the text.

        Set `_reader` where a call may start. If the text is still ambiguous, store it in `_pending` and
        return an empty string.
        """

    @abstractmethod
    def _call_ended(self, failed: bool) -> None:
        """Handle the end of a call; `failed` means that the reader found that the text is not a call."""

    def _read_call(self, reader: ToolCallReader, text: str) -> str:
        had_started = reader.started
        new_arguments, rest = reader.add(text)
        if reader.name in self._ignored:
            pass
        elif reader.started and not had_started:
            self._output.start_call(reader.name or "", new_arguments)
        else:
            self._output.add_arguments(new_arguments)
        if reader.ended:
            self._reader = None
            if reader.failed:
                self._add_content(reader.raw)
            self._call_ended(reader.failed)
        return rest

    def _add_content(self, text: str) -> None:
        """Remove markers from text that turned out not to be a call, and add the rest to the content."""
        self._output.add_content(self._any_marker.sub("", text))

    def _content_until_marker(self, text: str) -> tuple[str, str]:
        """Add to the content the text before the next marker; return the marker and the text after it.

        If there is no marker, return two empty strings and hold back what may be the beginning of one.
        """
        marker_match = self._any_marker.search(text)
        if marker_match is not None:
            self._output.add_content(text[: marker_match.start()])
            return marker_match[0], text[marker_match.end() :]
        cut = len(text) - max((partial_match_length(text, marker) for marker in self.markers), default=0)
        self._output.add_content(text[:cut])
        self._pending = text[cut:]
        return "", ""

    def _take_marker(self, text: str) -> tuple[str, str] | None:
        """Return the marker that a text begins with, and the text after it; None if it begins with none.

        If the text is the beginning of a marker, hold it back and return two empty strings.
        """
        for marker in self.markers:
            if text.startswith(marker):
                return marker, text[len(marker) :]
        if any(marker.startswith(text) for marker in self.markers):
            self._pending = text
            return "", ""
        return None

    def _expect_object(self) -> None:
        """Make a reader parse the text that follows; it expects a call in the form of a JSON object."""
        self._reader = CallReader(self._names)
