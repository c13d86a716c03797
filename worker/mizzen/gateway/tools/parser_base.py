"""What every family's parser does alike."""

from __future__ import annotations

import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Protocol

from mizzen.gateway.requests.output import OutputDelta, ToolCallDelta
from mizzen.gateway.text.stop import StopStrings, partial
from mizzen.gateway.tools.call_reader import CallReader
from mizzen.gateway.tools.json_scanner import WHITESPACE

_ALPHABET = string.ascii_letters + string.digits


class ToolParser(Protocol):
    """Turns one answer's text into content and calls. How the text is cut into pieces changes nothing."""

    def feed(self, text: str) -> OutputDelta:
        """Take the next text and return what is certain now."""
        ...

    def end(self) -> OutputDelta:
        """Return what was held back; the answer has ended."""
        ...

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        ...

    @property
    def open(self) -> bool:
        """Whether the arguments of the call that was begun last are still to be written."""
        ...

    @property
    def stopped(self) -> bool:
        """Whether the content has come to a stop string; nothing is taken any more."""
        ...


class Reader(Protocol):
    """Reads one call; see `CallReader`."""

    name: str | None
    started: bool
    failed: bool

    @property
    def ended(self) -> bool: ...  # noqa: D102

    @property
    def whole(self) -> bool: ...  # noqa: D102

    @property
    def raw(self) -> str: ...  # noqa: D102

    def add(self, text: str) -> tuple[str, str]: ...  # noqa: D102


class Collector:
    """Collects what a parser finds. White space beside a call belongs to the format and is no content.

    Content is looked through for stop strings as it comes, white space that may still belong to a call
    included: an answer of blank lines without end must not outlast a stop string of blank lines.
    """

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._stop = StopStrings(stop) if stop else None
        self._content: list[str] = []
        self._space: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._count = 0
        self._behind_call = False

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        return self._count

    @property
    def stopped(self) -> bool:
        """Whether the content has come to a stop string."""
        return self._stop is not None and self._stop.found is not None

    def content(self, text: str) -> None:
        """Add text, up to a stop string."""
        if self._behind_call:
            text = text.lstrip(WHITESPACE)
            self._behind_call = not text
        self._add(text if self._stop is None else self._stop.add(text))

    def _add(self, text: str) -> None:
        body = text.rstrip(WHITESPACE)
        if body:
            self._content += [*self._space, body]
            self._space = []
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def start(self, name: str, arguments: str) -> None:
        """Begin a call."""
        self._release()
        self._space, self._behind_call = [], True
        self._calls.append(ToolCallDelta(self._count, new_call_id(), name))
        self._count += 1
        self.arguments(arguments)

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that was begun last."""
        if text:
            self._calls.append(ToolCallDelta(self._count - 1, arguments=text))

    def end(self) -> None:
        """Let white space at the end be content, unless a call is before it."""
        self._release()
        self._content += self._space
        self._space = []

    def _release(self) -> None:
        """Let what might have begun a stop string be content."""
        if self._stop is not None:
            self._add(self._stop.flush())

    def take(self) -> OutputDelta:
        """Return what has come since the last time."""
        delta = OutputDelta("".join(self._content), tool_calls=tuple(self._calls))
        self._content, self._calls = [], []
        return delta


def new_call_id() -> str:
    """Return an id in OpenAI's form."""
    return "call_" + "".join(secrets.choice(_ALPHABET) for _ in range(24))


class MarkedParser(ABC):
    """A family's parser: a reader within calls, and the family's own rules between them."""

    markers: tuple[str, ...] = ()
    """Never a part of content."""

    def __init__(self, names: Collection[str], stop: tuple[str, ...] = ()) -> None:
        self._names = frozenset(names)
        self._found = Collector(stop)
        self._reader: Reader | None = None
        self._held = ""
        self._any_marker = re.compile("|".join(map(re.escape, self.markers)) or r"(?!)")

    @property
    def calls(self) -> int:
        """See `ToolParser`."""
        return self._found.calls

    @property
    def open(self) -> bool:
        """See `ToolParser`."""
        return self._reader is not None and self._reader.started and not self._reader.whole

    @property
    def stopped(self) -> bool:
        """See `ToolParser`."""
        return self._found.stopped

    def feed(self, text: str) -> OutputDelta:
        """See `ToolParser`."""
        text, self._held = self._held + text, ""
        while text and not self.stopped:
            text = self._between(text) if self._reader is None else self._read(self._reader, text)
        return self._found.take()

    def end(self) -> OutputDelta:
        """See `ToolParser`."""
        if self._reader is None or not self._reader.started:
            self._content(self._reader.raw if self._reader is not None else "")
        self._found.content(self._held)
        self._held = ""
        self._found.end()
        return self._found.take()

    @abstractmethod
    def _between(self, text: str) -> str:
        """Take text that is in no call, all of it or a part; set the reader where a call may begin.

        Returns the rest. What cannot be told yet is kept in `_held`, and then the rest is empty.
        """

    @abstractmethod
    def _ended(self, failed: bool) -> None:
        """Note that the reader has read a call to its end, or that there was none."""

    def _read(self, reader: Reader, text: str) -> str:
        had_started = reader.started
        given, rest = reader.add(text)
        if reader.started and not had_started:
            self._found.start(reader.name or "", given)
        else:
            self._found.arguments(given)
        if reader.ended:
            self._reader = None
            if reader.failed:
                self._content(reader.raw)
            self._ended(reader.failed)
        return rest

    def _content(self, text: str) -> None:
        """Add text that a reader has given back."""
        self._found.content(self._any_marker.sub("", text))

    def _until_marker(self, text: str) -> tuple[str, str]:
        """Take content up to the next marker; return the marker, if there is one, and the rest."""
        found = self._any_marker.search(text)
        if found is not None:
            self._found.content(text[: found.start()])
            return found[0], text[found.end() :]
        cut = len(text) - max((partial(text, marker) for marker in self.markers), default=0)
        self._found.content(text[:cut])
        self._held = text[cut:]
        return "", ""

    def _read_object(self) -> None:
        """Expect a call as a JSON object."""
        self._reader = CallReader(self._names)
