# SPDX-License-Identifier: Apache-2.0
"""Tool calls as a JSON list of objects, which may follow a marker.

| class | models | syntax |
|---|---|---|
| `BareListParser` | any, if a grammar forces calls | `[{…}, …]` |
| `GraniteParser` | Granite 3, Phi-4-mini | `<|tool_call|>[{…}, …]`, with or without `<|/tool_call|>` |
| `CohereParser` | Command R7B, Command A | `<|START_ACTION|>[{…}, …]<|END_ACTION|>` |
| `CommandRParser` | Command R, Command R+ | `Action: ` and a code block with `[{…}, …]` |
| `HunyuanParser` | Hunyuan | `<tool_calls>[{…}, …]</tool_calls>` |

Each object has a name and arguments. A single object without a list is accepted, too.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Protocol

from mizzen.gateway.text.stop import partial_match_length
from mizzen.gateway.tools.call_reader import CallReader
from mizzen.gateway.tools.json_scanner import WHITESPACE, ValueScanner, skip_whitespace
from mizzen.gateway.tools.parser_base import ArgumentSchemas, MarkerParser, ToolCallReader
from mizzen.gateway.tools.parsers.named import NAME_START, NamedCallReader

FENCE = "```"
DIRECT_ANSWERS = frozenset({"directly-answer", "directly_answer"})
"""Names of a tool that Command R calls in order to call no tool."""


class ElementScanner(Protocol):
    """Incremental scanner that finds the end of an element of a list."""

    done: bool
    """True if the element has ended."""

    def scan(self, text: str, at: int) -> int:
        """Return the index after the part of `text[at:]` that belongs to the element."""
        ...


class BareListParser(MarkerParser):
    """Parser of a list of calls, or of a single call.

    Calls follow one of `begins`. A class without `begins` parses output that starts with calls. An element of
    a list that is not a call becomes content. The elements after it may be calls again, unless it looks like
    prose and no call precedes it.
    """

    begins: tuple[str, ...] = ()
    """Markers after which calls follow."""
    ends: tuple[str, ...] = ()
    """Markers that end the calls."""
    _markers_are_text = False
    """True if a marker that no call follows belongs to the content."""

    def __init__(self, tools: ArgumentSchemas, stop: tuple[str, ...] = ()) -> None:
        super().__init__(tools, stop)
        self._in_calls = not self.begins
        self._in_list = False
        self._opening = ""
        """Text read since a marker, the start of a list or a failed element; it becomes content if no call
        follows."""
        self._call_read = False
        """Whether a call has been read since the calls or the list began."""
        self._after_failed = False
        """Whether the last element of the list was not a call."""
        self._skipped: ElementScanner | None = None
        """Scanner of the element of a list that is not a call, until the element ends."""
        self._skipped_text: list[str] = []
        """Text of the last element that was not a call."""

    def _parse_between_calls(self, text: str) -> str:
        if self._skipped is not None:
            return self._skip_element(self._skipped, text)
        if not self._in_calls:
            marker, rest = self._content_until_marker(text)
            self._in_calls, self._call_read = marker in self.begins, False
            self._opening = marker if self._markers_are_text else ""
            return rest
        at = skip_whitespace(text, 0)
        if at and (self._opening or self._after_failed or (self.begins and not self._in_list)):
            self._opening += text[:at]
        elif at:
            self._output.add_content(text[:at])
        if at:
            return text[at:]
        taken = self._take_marker(text)
        if taken is None:
            return self._in_call_list(text)
        marker, rest = taken
        if marker in self.ends:
            self._leave_calls()
        return rest

    def _in_call_list(self, text: str) -> str:
        first = text[0]
        self._reader = self._create_reader(first)
        if self._reader is not None:
            return text
        if first == "[" and not self._in_list:
            self._in_list, self._opening = True, self._opening + first
            self._call_read = False
            return text[1:]
        if self._in_list and self._after_failed and first in ",]":
            self._opening, self._after_failed = self._opening + first, False
            if first == "]":
                self._leave_calls()
            return text[1:]
        if self._in_list and not self._opening and first in ",]":
            self._in_calls = self._in_list = first == ","
            return text[1:]
        self._leave_calls()
        return text

    def _create_reader(self, first: str) -> ToolCallReader | None:
        """Return a reader of a call that starts with the character `first`; None if no call does."""
        return CallReader(self._names | self._ignored) if first == "{" else None

    def _scan_elements(self) -> ElementScanner:
        """Return a scanner that finds the end of an element of a list that is not a call."""
        return ValueScanner()

    def _looks_like_call(self, element: str) -> bool:
        """Return whether an element that is not a call of a tool has the syntax of a call."""
        return True  # prose does not begin with the brace that begins an element

    def _leave_calls(self) -> None:
        self._add_content("")
        self._in_calls = self._in_list = self._after_failed = False

    def _call_ended(self, failed: bool) -> None:
        self._in_calls, self._after_failed = self._in_list, False
        self._call_read = self._call_read or not failed
        self._opening = ""

    def _read_call(self, reader: ToolCallReader, text: str) -> str:
        rest = super()._read_call(reader, text)
        if reader.failed and self._in_calls:
            self._after_failed, self._skipped_text = True, []
            self._skipped = self._scan_elements()
            self._scan_skipped(self._skipped, reader.raw)
        return rest

    def _scan_skipped(self, scanner: ElementScanner, text: str) -> int:
        """Return the index after the part of a text that belongs to an element that is not a call.

        Leave the calls at the end of an element that shows that the text is prose.
        """
        end = scanner.scan(text, 0)
        self._skipped_text.append(text[:end])
        if scanner.done:
            self._skipped = None
            if not self._call_read and not self._looks_like_call("".join(self._skipped_text)):
                self._leave_calls()
        return end

    def _skip_element(self, scanner: ElementScanner, text: str) -> str:
        """Add to the content the text of an element that is not a call; return the text after it.

        A marker ends the calls: then the element is incomplete.
        """
        found = self._any_marker.search(text)
        held = max((partial_match_length(text, marker) for marker in self.markers), default=0)
        body = text[: found.start()] if found is not None else text[: len(text) - held]
        end = self._scan_skipped(scanner, body)
        self._output.add_content(body[:end])
        if scanner.done:
            return text[end:]
        if found is not None:
            self._skipped = None
            self._leave_calls()
        else:
            self._pending = text[end:]
            return ""
        return text[end:]

    def _add_content(self, text: str) -> None:
        """Add to the content the text that might have opened a call, and then `text`, which is not a call."""
        text, self._opening = self._opening + text, ""
        if self._markers_are_text:
            self._output.add_content(text)
        else:
            super()._add_content(text)


class GraniteParser(BareListParser):
    """Parser of a list after `<|tool_call|>`; Granite 3.1 may write `<tool_call>` instead."""

    begins = ("<|tool_call|>", "<tool_call>")
    ends = ("<|/tool_call|>", "</tool_call>")
    markers = (*begins, *ends)


class CohereParser(BareListParser):
    """Parser of a list between `<|START_ACTION|>` and `<|END_ACTION|>`."""

    begins = ("<|START_ACTION|>",)
    ends = ("<|END_ACTION|>",)
    markers = (*begins, *ends)


class FencedListParser(BareListParser):
    """Base of parsers of calls that may be in a code block, whose end is dropped."""

    def __init__(self, tools: ArgumentSchemas, stop: tuple[str, ...] = ()) -> None:
        super().__init__(tools, stop)
        self._closing = False

    @abstractmethod
    def _opened_fence(self) -> bool:
        """Return whether the call that has just ended was in a code block."""

    def _parse_between_calls(self, text: str) -> str:
        if self._closing and not self._in_list:
            body = text.lstrip(WHITESPACE)
            if len(body) < len(FENCE) and FENCE.startswith(body):
                self._pending = body
                return ""
            self._closing = False
            text = body.removeprefix(FENCE)
            if not text:
                return ""
        return super()._parse_between_calls(text)

    def _call_ended(self, failed: bool) -> None:
        self._closing = not failed and self._opened_fence()
        super()._call_ended(failed)


class CommandRParser(FencedListParser):
    """Parser of a list in a code block after `Action:`."""

    begins = ("Action: ```json", "Action:\n```json", "Action:```json")
    markers = begins
    _markers_are_text = True

    def __init__(self, tools: ArgumentSchemas, stop: tuple[str, ...] = ()) -> None:
        super().__init__(tools, stop)
        self._ignored = DIRECT_ANSWERS - self._names

    def _opened_fence(self) -> bool:
        return True


class HunyuanParser(FencedListParser):
    """Parser of a list between `<tool_calls>` and `</tool_calls>`.

    Each call may also be between `<tool_call>` and `</tool_call>`, as an object or as a name that is
    followed by the arguments, which may be in a code block.
    """

    begins = ("<tool_calls>", "<tool_call>")
    ends = ("</tool_calls>", "</tool_call>")
    markers = (*begins, *ends)
    _head = re.compile(r"([\w.-]+)\s*(?:```json)?\s*", re.ASCII)

    _named: NamedCallReader | None = None
    """Reader of the last call, if it is a name with arguments."""

    def _create_reader(self, first: str) -> ToolCallReader | None:
        self._named = None
        if not self._in_list and NAME_START.match(first):
            self._named = NamedCallReader(self._names, self._head)
            return self._named
        return super()._create_reader(first)

    def _opened_fence(self) -> bool:
        return self._named is not None and FENCE in self._named.raw
