# SPDX-License-Identifier: Apache-2.0
"""Tags around the answer, which some models write after their reasoning, and their removal."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from mizzen.gateway.text.stop import partial_match_length
from mizzen.gateway.tools.json_scanner import WHITESPACE

MAX_SPACE = 64
"""Maximum number of white space characters that are held back before or after a tag."""
_SPACE_BEFORE_END = re.compile(r"[ \t\r\n]{0,8}\Z")


@dataclass(frozen=True, slots=True)
class AnswerTags:
    """Tags around the answer, such as `<response>` and `</response>`."""

    begin: str
    end: str
    before: tuple[str, ...] = ()
    """Markers of tool calls that may follow the closing tag; otherwise nothing follows it."""
    around_calls: bool = False
    """True if tool calls are between the tags, too."""


class _State(enum.Enum):
    BEFORE = 0
    """Before any text except white space; the opening tag may follow."""
    OPENED = 1
    """After the opening tag, where white space is dropped."""
    INSIDE = 2


class AnswerUnwrapper:
    """Incremental filter that removes the tags around an answer, and white space next to them.

    The opening tag counts only at the start of the answer, and the closing tag only at its end; elsewhere,
    they are text. The result does not depend on how the text is divided among calls of `feed`.
    """

    def __init__(self, tags: AnswerTags) -> None:
        self._tags = tags
        self._state = _State.BEFORE
        self._pending = ""

    def feed(self, text: str) -> str:
        """Add text; return the new text of the answer that is certain."""
        self._pending += text
        if self._state is _State.BEFORE:
            self._read_start()
        if self._state is _State.OPENED:
            self._pending = self._pending.lstrip(WHITESPACE)
            self._state = _State.INSIDE if self._pending else _State.OPENED
        parts: list[str] = []
        while self._state is _State.INSIDE and self._pending and self._read_inside(parts):
            pass
        return "".join(parts)

    def end(self) -> str:
        """End the answer; return the text that was held back, without a closing tag."""
        pending, self._pending = self._pending, ""
        closed = self._state is _State.INSIDE and pending.lstrip(WHITESPACE).startswith(self._tags.end)
        return "" if closed else pending

    def _read_start(self) -> None:
        body = self._pending.lstrip(WHITESPACE)
        if len(self._pending) - len(body) > MAX_SPACE:
            self._state = _State.INSIDE
        elif body.startswith(self._tags.begin):
            self._pending, self._state = body[len(self._tags.begin) :], _State.OPENED
        elif not self._tags.begin.startswith(body):
            self._state = _State.INSIDE

    def _read_inside(self, parts: list[str]) -> bool:
        """Move certain text from `_pending` to `parts`; return whether more of it may be certain."""
        text, end = self._pending, self._tags.end
        at = text.find(end)
        if at < 0:
            cut = self._space_start(text, len(text) - partial_match_length(text, end))
            parts.append(text[:cut])
            self._pending = text[cut:]
            return False
        rest = text[at + len(end) :]
        body = rest.lstrip(WHITESPACE)
        cut = self._space_start(text, at)
        short = len(rest) - len(body) <= MAX_SPACE
        if short and body.startswith(self._tags.before):
            parts.append(text[:cut])
            self._pending = body
            return True
        if short and (not body or any(marker.startswith(body) for marker in self._tags.before)):
            parts.append(text[:cut])
            self._pending = text[cut:]
            return False
        parts.append(text[: at + len(end)])  # text follows, so the tag is part of it
        self._pending = rest
        return True

    @staticmethod
    def _space_start(text: str, at: int) -> int:
        """Return the index at which the white space before index `at` begins."""
        found = _SPACE_BEFORE_END.search(text[max(0, at - 8) : at])
        return at if found is None else at - len(found[0])
