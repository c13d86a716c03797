# SPDX-License-Identifier: Apache-2.0
"""Incremental parser that separates reasoning from content."""

from __future__ import annotations

import enum

from mizzen.gateway.reasoning.answer_tags import AnswerTags, AnswerUnwrapper
from mizzen.gateway.text.stop import partial_match_length
from mizzen.gateway.tools.json_scanner import WHITESPACE


class _ReasoningState(enum.Enum):
    START = 0
    """At the start of the output, before any text except white space; reasoning may begin."""
    OPENED = 1
    """After the opening tag, where white space is dropped."""
    INSIDE = 2
    CLOSED = 3
    """After the closing tag, where white space is dropped."""
    OUTSIDE = 4


class ReasoningParser:
    """Incremental parser that splits output into reasoning, which comes first, and content.

    The result does not depend on how the text is divided among calls of `feed`. White space next to the tags
    is dropped.
    """

    def __init__(
        self,
        begins: tuple[str, ...],
        ends: tuple[str, ...],
        starts_inside: bool = False,
        *,
        answer: AnswerTags | None = None,
        closed: bool = False,
    ) -> None:
        """Set the tags.

        Args:
            begins: Opening tags.
            ends: Closing tags.
            starts_inside: True if the output starts within reasoning, without a tag.
            answer: Tags around the content, if the model writes any.
            closed: True if the prompt closes the reasoning, so that the output contains none.
        """
        self._begins = begins
        self._ends = ends
        self._starts_inside = starts_inside
        self._answer = AnswerUnwrapper(answer) if answer is not None else None
        self._state = _ReasoningState.OUTSIDE if closed else _ReasoningState.START
        self._pending = ""
        self._whitespace: list[str] = []
        self.has_reasoning = starts_inside and not closed
        """True if the output has reasoning, judging by the text so far."""

    @property
    def in_reasoning(self) -> bool:
        """True if the next text may be reasoning."""
        return self._state in (_ReasoningState.START, _ReasoningState.OPENED, _ReasoningState.INSIDE)

    def feed(self, text: str) -> tuple[str, str]:
        """Parse more text; return the new reasoning and the new content.

        Text is held back while it may be part of a tag, and white space while it may precede a tag.
        """
        reasoning, content = self._split(text)
        return reasoning, content if self._answer is None else self._answer.feed(content)

    def _split(self, text: str) -> tuple[str, str]:
        """Return the new reasoning, and the new content with tags around it."""
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
        """End the output; return the reasoning and the content that were held back."""
        reasoning, content = self._end_split()
        return reasoning, content if self._answer is None else self._answer.feed(content) + self._answer.end()

    def _end_split(self) -> tuple[str, str]:
        pending, self._pending = self._pending, ""
        if self._state is _ReasoningState.INSIDE:
            return ("".join([*self._whitespace, pending]) if pending else ""), ""
        if self._state is _ReasoningState.START and self._starts_inside:
            return pending.strip(WHITESPACE), ""
        space = "".join(self._whitespace) if self._state is _ReasoningState.START else ""
        return "", space + pending

    def _read_start(self, text: str) -> str:
        body = text.lstrip(WHITESPACE)
        self._whitespace.append(text[: len(text) - len(body)])  # stored apart, so that it is read once
        for begin in self._begins:
            if body.startswith(begin):
                self._state, self.has_reasoning, self._whitespace = _ReasoningState.OPENED, True, []
                return body[len(begin) :]
        if any(begin.startswith(body) for begin in self._begins):
            self._pending = body
            return ""
        space, self._whitespace = "".join(self._whitespace), []
        self._state = _ReasoningState.OPENED if self._starts_inside else _ReasoningState.OUTSIDE
        return space + body

    def _read_inside(self, text: str) -> tuple[str, str]:
        """Return the reasoning in a text, and the text after the closing tag; hold back a partial tag."""
        found = min(((text.find(end), end) for end in self._ends if end in text), default=None)
        if found is not None:
            self._state = _ReasoningState.CLOSED
            at, end = found
            text, rest = text[:at], text[at + len(end) :]
        else:
            cut = len(text) - max(partial_match_length(text, end) for end in self._ends)
            self._pending, text, rest = text[cut:], text[:cut], ""
        body = text.rstrip(WHITESPACE)
        reasoning = "".join([*self._whitespace, body]) if body else ""
        if body:
            self._whitespace = []
        if len(body) < len(text):
            self._whitespace.append(text[len(body) :])
        return reasoning, rest
