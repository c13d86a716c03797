"""Splits reasoning from content."""

from __future__ import annotations

import enum

from mizzen.gateway.text.stop import partial
from mizzen.gateway.tools.json_scanner import WHITESPACE


class _State(enum.Enum):
    START = 0
    """Reasoning may begin here."""
    OPENED = 1
    """Behind the opening tag; white space here belongs to the format."""
    INSIDE = 2
    CLOSED = 3
    """Behind the closing tag; white space here belongs to the format."""
    OUTSIDE = 4


class ReasoningParser:
    """Splits one answer's text at the tags of its reasoning, which comes first.

    How the text is cut into pieces changes nothing. White space beside the tags is left out.
    """

    def __init__(self, begin: str, end: str, opened: bool) -> None:
        """Take the tags; `opened` says that the reasoning has begun: in the prompt, or by habit."""
        self._begin = begin
        self._end = end
        self._opened = opened
        self._state = _State.START
        self._held = ""
        self._space: list[str] = []
        self.found = opened
        """Whether there is reasoning, as far as it is known."""

    @property
    def inside(self) -> bool:
        """Whether what comes next is reasoning, or may be."""
        return self._state in (_State.START, _State.OPENED, _State.INSIDE)

    def feed(self, text: str) -> tuple[str, str]:
        """Take the next text; return what is certain now of reasoning and of content."""
        if self._state is _State.OUTSIDE:
            return "", text
        text, self._held = self._held + text, ""
        if self._state is _State.START:
            text = self._start(text)
        if self._state is _State.OPENED:
            text = text.lstrip(WHITESPACE)
            self._state = _State.INSIDE if text else _State.OPENED
        reasoning = ""
        if self._state is _State.INSIDE:
            reasoning, text = self._inside(text)
        if self._state is _State.CLOSED:
            text = text.lstrip(WHITESPACE)
            self._state = _State.OUTSIDE if text else _State.CLOSED
        return reasoning, text if self._state is _State.OUTSIDE else ""

    def end(self) -> tuple[str, str]:
        """Return what was held back; the answer has ended."""
        held, self._held = self._held, ""
        if self._state is _State.INSIDE:
            return ("".join([*self._space, held]) if held else ""), ""
        if self._state is _State.START and self._opened:
            return held.strip(WHITESPACE), ""
        return "", held

    def _start(self, text: str) -> str:
        body = text.lstrip(WHITESPACE)
        if body.startswith(self._begin):
            self._state, self.found = _State.OPENED, True
            return body[len(self._begin) :]
        if self._begin.startswith(body):
            self._held = text
            return ""
        self._state = _State.OPENED if self._opened else _State.OUTSIDE
        return text

    def _inside(self, text: str) -> tuple[str, str]:
        """Return reasoning, and what is behind its end."""
        at = text.find(self._end)
        if at >= 0:
            self._state = _State.CLOSED
            text, rest = text[:at], text[at + len(self._end) :]
        else:
            cut = len(text) - partial(text, self._end)
            self._held, text, rest = text[cut:], text[:cut], ""
        body = text.rstrip(WHITESPACE)
        given = "".join([*self._space, body]) if body else ""
        if body:
            self._space = []
        if len(body) < len(text):
            self._space.append(text[len(body) :])
        return given, rest
