# SPDX-License-Identifier: Apache-2.0
"""Incremental parser of answers in the harmony format."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping

from mizzen.gateway.harmony.header import ANALYSIS, HeaderReader, MessageHeader
from mizzen.gateway.harmony.markers import ANY_MARK, CHANNEL, CONSTRAIN, MARKERS, MESSAGE, START
from mizzen.gateway.requests.output import OutputDelta, ToolCallDelta
from mizzen.gateway.text.stop import StopStrings
from mizzen.gateway.tools.parser_base import new_call_id

NAMESPACE = "functions."
"""Prefix of a tool's name in the recipient of a call."""
SEPARATOR = "\n\n"
"""Text between two messages of the same kind, which become one text."""


class MessageKind(enum.Enum):
    """Kind of a message: the part of the API's answer to which its text belongs."""

    CONTENT = 0
    REASONING = 1
    CALL = 2


class HarmonyParser:
    """An `OutputParser` of messages in harmony format, whose markers are the characters in `MARKERS`.

    Messages on the channel `analysis` are reasoning, messages to an offered tool are calls, and all other
    messages are content: the answer (`final`), and texts for the user before calls (`commentary`). The
    result does not depend on how the text is divided among calls of `feed`, and there is no text that the
    parser rejects.
    """

    __slots__ = (
        "_begun",
        "_call_count",
        "_calls",
        "_content",
        "_has_arguments",
        "_header",
        "_header_tokens",
        "_keep_reasoning",
        "_kind",
        "_names",
        "_reasoning",
        "_stop",
        "_texts",
        "marks",
        "reasoning_tokens",
    )

    shown: tuple[str, ...] = ()

    def __init__(
        self,
        marks: Mapping[int, str],
        names: Collection[str] = (),
        stop: tuple[str, ...] = (),
        *,
        keep_reasoning: bool = True,
    ) -> None:
        """Begin an answer, before its first message.

        Args:
            marks: Marks of the format's tokens by their ids.
            names: Names of the tools that may be called.
            stop: Stop strings of the content.
            keep_reasoning: False if reasoning is to become content.
        """
        self.marks = marks
        """Marks by which detokenization replaces tokens, by the ids of the tokens."""
        self.reasoning_tokens = 0
        """Number of tokens in messages that are reasoning, including their headers."""
        self._names = frozenset(names)
        self._stop = StopStrings(stop) if stop else None
        self._keep_reasoning = keep_reasoning
        self._header: HeaderReader | None = HeaderReader()
        """Reader of the header of the next message; None within a message's text."""
        self._header_tokens = 0
        self._kind = MessageKind.CONTENT
        self._begun = False
        """True if the current message has text."""
        self._has_arguments = False
        """True if the current call has arguments."""
        self._texts: set[MessageKind] = set()
        """Kinds of the messages so far that have text."""
        self._call_count = 0
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []

    @property
    def counts_tokens(self) -> bool:
        """True while the output is, or may become, reasoning."""
        return self._header is not None or self._kind is MessageKind.REASONING

    @property
    def in_header(self) -> bool:
        """True between messages, and within a header."""
        return self._header is not None

    @property
    def sections(self) -> tuple[str, ...]:
        """Markers of the current header so far; empty within a message's text."""
        return () if self._header is None else self._header.sections

    @property
    def kind(self) -> MessageKind:
        """Kind of the current message, or of the last one."""
        return self._kind

    @property
    def finish_reason(self) -> str | None:
        """`tool_calls` if the output has calls and the last one is complete; else None."""
        is_open = self._header is None and self._kind is MessageKind.CALL
        return "tool_calls" if self._call_count and not is_open else None

    @property
    def stopped(self) -> bool:
        """True if a stop string has ended the answer."""
        return self.stop_string is not None

    @property
    def stop_string(self) -> str | None:
        """Stop string that has ended the answer; None if none has."""
        return None if self._stop is None else self._stop.matched

    def skip_prompt(self, text: str) -> None:
        """Read the header of the first message, which is in the prompt; its call is part of the answer."""
        self._read(text)
        self._content, self._reasoning = [], []
        self._texts, self._begun = set(), False

    def feed(self, text: str) -> OutputDelta:
        """Parse more text; return the new reasoning, content and tool calls."""
        if self._header is not None:
            self._header_tokens += 1
        elif self._kind is MessageKind.REASONING:
            self.reasoning_tokens += 1
        self._read(text)
        return self._take_delta()

    def end(self, rest: str = "", *, cut_off: bool = False) -> OutputDelta:
        """Parse the last text, which does not count as a token; return all output that was held back.

        With `cut_off`, it was not the model that ended the text, so a call that is open stays incomplete.
        """
        self._read(rest)
        if self._header is not None:
            self._end_header(self._header, cut_off=cut_off)
        if not cut_off:
            self._end_message()
        if self._stop is not None:
            self._content.append(self._stop.flush())
        return self._take_delta()

    def _read(self, text: str) -> None:
        for part in ANY_MARK.split(text):
            if self.stopped:
                return
            marker = MARKERS.get(part)
            if marker is not None:
                self._read_marker(marker)
            elif part:
                self._read_text(part)

    def _read_text(self, text: str) -> None:
        header = self._header
        if header is None:
            self._add_text(text)
            return
        body = header.add(text)
        if body is not None:
            self._begin_message(header.header())
            if body:
                self._add_text(body)

    def _read_marker(self, marker: str) -> None:
        header = self._header
        if marker == MESSAGE:
            if header is not None:
                self._begin_message(header.header())
        elif marker == CONSTRAIN or (marker == CHANNEL and header is not None):
            if header is not None:
                header.begin_section(marker)
        else:
            if header is not None:
                self._end_header(header)
            self._end_message()
            self._header = HeaderReader()
            if marker in (START, CHANNEL):
                self._header.begin_section(marker)

    def _end_header(self, header: HeaderReader, *, cut_off: bool = False) -> None:
        """End a header that no `<|message|>` follows: text that does not belong to it becomes a message."""
        ended, text = header.end(cut_off=cut_off)
        if text:
            self._begin_message(ended)
            self._add_text(text)

    def _begin_message(self, header: MessageHeader) -> None:
        self._header, self._begun, self._has_arguments = None, False, False
        name = header.recipient.removeprefix(NAMESPACE)
        if name in self._names:
            self._kind = MessageKind.CALL
            self._start_call(name)
        elif header.channel == ANALYSIS and self._keep_reasoning:
            self._kind = MessageKind.REASONING
            self.reasoning_tokens += self._header_tokens
        else:
            self._kind = MessageKind.CONTENT
        self._header_tokens = 0

    def _start_call(self, name: str) -> None:
        if self._stop is not None:
            self._content.append(self._stop.flush())
        self._calls.append(ToolCallDelta(self._call_count, new_call_id(), name))
        self._call_count += 1

    def _add_text(self, text: str) -> None:
        """Add text to the current message; a separator precedes further texts of its kind."""
        begins, self._begun = not self._begun, True
        if self._kind is MessageKind.CALL:
            self._has_arguments = self._has_arguments or bool(text.strip())
            self._calls.append(ToolCallDelta(self._call_count - 1, arguments=text))
            return
        if begins and self._kind in self._texts:
            text = SEPARATOR + text
        self._texts.add(self._kind)
        if self._kind is MessageKind.REASONING:
            self._reasoning.append(text)
        else:
            self._content.append(text if self._stop is None else self._stop.add(text))

    def _end_message(self) -> None:
        """End the current message, if there is one; a call without arguments gets an empty object."""
        if self._header is not None:
            return
        if self._kind is MessageKind.CALL and not self._has_arguments:
            self._calls.append(ToolCallDelta(self._call_count - 1, arguments="{}"))
        self._header = HeaderReader()

    def _take_delta(self) -> OutputDelta:
        delta = OutputDelta("".join(self._content), "".join(self._reasoning), tuple(self._calls))
        self._content, self._reasoning, self._calls = [], [], []
        return delta
