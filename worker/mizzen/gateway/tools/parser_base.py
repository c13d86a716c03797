"""Common base of the tool call parsers of all families."""

from __future__ import annotations

import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Protocol

from mizzen.gateway.requests.output import OutputDelta, ToolCallDelta
from mizzen.gateway.text.stop import StopStrings, partial_match_length
from mizzen.gateway.tools.call_reader import CallReader
from mizzen.gateway.tools.json_scanner import WHITESPACE

_ALPHABET = string.ascii_letters + string.digits


class ToolParser(Protocol):
    """Parse the text of one output into content and calls.

    The result does not depend on how the text is split.
    """

    def feed(self, text: str) -> OutputDelta:
        """Parse more text and return the output that is certain now."""
        ...

    def end(self) -> OutputDelta:
        """Return the output that was held back; the text has ended."""
        ...

    @property
    def call_count(self) -> int:
        """Number of calls started so far."""
        ...

    @property
    def call_open(self) -> bool:
        """Whether the arguments of the last call are incomplete."""
        ...

    @property
    def stopped(self) -> bool:
        """Whether the content has reached a stop string; further text is ignored."""
        ...


class ToolCallReader(Protocol):
    """Reader of one call; see `CallReader`."""

    name: str | None
    started: bool
    failed: bool

    @property
    def ended(self) -> bool: ...  # noqa: D102

    @property
    def arguments_complete(self) -> bool: ...  # noqa: D102

    @property
    def raw(self) -> str: ...  # noqa: D102

    def add(self, text: str) -> tuple[str, str]: ...  # noqa: D102


class OutputCollector:
    """Collect a parser's content and calls.

    White space next to a call belongs to the syntax, not to the content. Stop strings are searched as content
    arrives, including white space that may still belong to a call: otherwise endless blank lines would never
    reach a stop string of blank lines.
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
        """Whether the content has reached a stop string."""
        return self._stop is not None and self._stop.matched is not None

    def add_content(self, text: str) -> None:
        """Add text, up to a stop string."""
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
        """Start a call."""
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
        """Add pending white space to the content, unless a call precedes it."""
        self._release_pending()
        self._content += self._space
        self._space = []

    def _release_pending(self) -> None:
        """Add text that might have started a stop string to the content."""
        if self._stop is not None:
            self._add(self._stop.flush())

    def take_delta(self) -> OutputDelta:
        """Return the output collected since the last call of this method."""
        delta = OutputDelta("".join(self._content), tool_calls=tuple(self._calls))
        self._content, self._calls = [], []
        return delta


def new_call_id() -> str:
    """Return a new call id in OpenAI's form."""
    return "call_" + "".join(secrets.choice(_ALPHABET) for _ in range(24))


class MarkerParser(ABC):
    """Base of a family's parser: a reader parses calls, and the family's own rules apply between them."""

    markers: tuple[str, ...] = ()
    """Strings that never become content."""

    def __init__(self, names: Collection[str], stop: tuple[str, ...] = ()) -> None:
        self._names = frozenset(names)
        self._output = OutputCollector(stop)
        self._reader: ToolCallReader | None = None
        self._pending = ""
        self._any_marker = re.compile("|".join(map(re.escape, self.markers)) or r"(?!)")

    @property
    def call_count(self) -> int:
        """See `ToolParser`."""
        return self._output.call_count

    @property
    def call_open(self) -> bool:
        """See `ToolParser`."""
        return self._reader is not None and self._reader.started and not self._reader.arguments_complete

    @property
    def stopped(self) -> bool:
        """See `ToolParser`."""
        return self._output.stopped

    def feed(self, text: str) -> OutputDelta:
        """See `ToolParser`."""
        text, self._pending = self._pending + text, ""
        while text and not self.stopped:
            text = (
                self._parse_between_calls(text)
                if self._reader is None
                else self._read_call(self._reader, text)
            )
        return self._output.take_delta()

    def end(self) -> OutputDelta:
        """See `ToolParser`."""
        if self._reader is None or not self._reader.started:
            self._add_content(self._reader.raw if self._reader is not None else "")
        self._output.add_content(self._pending)
        self._pending = ""
        self._output.end()
        return self._output.take_delta()

    @abstractmethod
    def _parse_between_calls(self, text: str) -> str:
        """Consume text outside calls, all or part of it; set the reader where a call may start.

        Return the rest. Text that is still ambiguous goes to `_pending`, and the rest is then empty.
        """

    @abstractmethod
    def _call_ended(self, failed: bool) -> None:
        """Handle the end of a call, or the reader's finding that the text is not a call (`failed`)."""

    def _read_call(self, reader: ToolCallReader, text: str) -> str:
        had_started = reader.started
        new_arguments, rest = reader.add(text)
        if reader.started and not had_started:
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
        """Add text that a reader has rejected."""
        self._output.add_content(self._any_marker.sub("", text))

    def _content_until_marker(self, text: str) -> tuple[str, str]:
        """Consume content up to the next marker; return the marker ("" if not found) and the rest."""
        marker_match = self._any_marker.search(text)
        if marker_match is not None:
            self._output.add_content(text[: marker_match.start()])
            return marker_match[0], text[marker_match.end() :]
        cut = len(text) - max((partial_match_length(text, marker) for marker in self.markers), default=0)
        self._output.add_content(text[:cut])
        self._pending = text[cut:]
        return "", ""

    def _expect_object(self) -> None:
        """Expect a call written as a JSON object."""
        self._reader = CallReader(self._names)
