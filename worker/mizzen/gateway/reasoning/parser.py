"""Incremental parser that separates reasoning from content."""

from __future__ import annotations

import enum

from mizzen.gateway.text.stop import partial_match_length
from mizzen.gateway.tools.json_scanner import WHITESPACE


class _ReasoningState(enum.Enum):
    START = 0
    """Reasoning may start here."""
    OPENED = 1
    """After the opening tag; white space here belongs to the syntax."""
    INSIDE = 2
    CLOSED = 3
    """After the closing tag; white space here belongs to the syntax."""
    OUTSIDE = 4


class ReasoningParser:
    """Split output text at its reasoning tags; reasoning comes first.

    The result is the same for any split of the text. White space next to the tags is dropped.
    """

    def __init__(self, begin: str, end: str, starts_inside: bool) -> None:
        """Set the tags; `starts_inside` means that prompt or family has already opened the reasoning."""
        self._begin = begin
        self._end = end
        self._starts_inside = starts_inside
        self._state = _ReasoningState.START
        self._pending = ""
        self._whitespace: list[str] = []
        self.has_reasoning = starts_inside
        """Whether there is reasoning, as far as is known."""

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text is or may be reasoning."""
        return self._state in (_ReasoningState.START, _ReasoningState.OPENED, _ReasoningState.INSIDE)

    def feed(self, text: str) -> tuple[str, str]:
        """Parse more text; return the reasoning and the content that are certain now."""
        if self._state is _ReasoningState.OUTSIDE:
            return "", text
        text, self._pending = self._pending + text, ""
        if self._state is _ReasoningState.START:
            text = self._read_start(text)
        if self._state is _ReasoningState.OPENED:
            text = text.lstrip(WHITESPACE)
            self._state = _ReasoningState.INSIDE if text else _ReasoningState.OPENED
        reasoning = ""
        if self._state is _ReasoningState.INSIDE:
            reasoning, text = self._read_inside(text)
        if self._state is _ReasoningState.CLOSED:
            text = text.lstrip(WHITESPACE)
            self._state = _ReasoningState.OUTSIDE if text else _ReasoningState.CLOSED
        return reasoning, text if self._state is _ReasoningState.OUTSIDE else ""

    def end(self) -> tuple[str, str]:
        """Return the reasoning and content that were held back; the text has ended."""
        pending, self._pending = self._pending, ""
        if self._state is _ReasoningState.INSIDE:
            return ("".join([*self._whitespace, pending]) if pending else ""), ""
        if self._state is _ReasoningState.START and self._starts_inside:
            return pending.strip(WHITESPACE), ""
        return "", pending

    def _read_start(self, text: str) -> str:
        body = text.lstrip(WHITESPACE)
        if body.startswith(self._begin):
            self._state, self.has_reasoning = _ReasoningState.OPENED, True
            return body[len(self._begin) :]
        if self._begin.startswith(body):
            self._pending = text
            return ""
        self._state = _ReasoningState.OPENED if self._starts_inside else _ReasoningState.OUTSIDE
        return text

    def _read_inside(self, text: str) -> tuple[str, str]:
        """Return reasoning, and the text after its closing tag."""
        at = text.find(self._end)
        if at >= 0:
            self._state = _ReasoningState.CLOSED
            text, rest = text[:at], text[at + len(self._end) :]
        else:
            cut = len(text) - partial_match_length(text, self._end)
            self._pending, text, rest = text[cut:], text[:cut], ""
        body = text.rstrip(WHITESPACE)
        reasoning = "".join([*self._whitespace, body]) if body else ""
        if body:
            self._whitespace = []
        if len(body) < len(text):
            self._whitespace.append(text[len(body) :])
        return reasoning, rest
