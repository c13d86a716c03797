# SPDX-License-Identifier: Apache-2.0
"""Tool calls of GLM-4: a line with the name of a tool, and then a JSON object with the arguments.

    weather
    {"city": "Köln"}

A call is at the start of the output, after another call, or after `<|assistant|>`.
"""

from __future__ import annotations

from mizzen.gateway.tools.json_scanner import WHITESPACE, skip_whitespace
from mizzen.gateway.tools.parser_base import ArgumentSchemas, MarkerParser
from mizzen.gateway.tools.parsers.named import HeadedCallReader

ASSISTANT, OBSERVATION = "<|assistant|>", "<|observation|>"
MAX_SPACE = 16
"""Maximum number of white space characters between a name and its arguments."""


class NameLineReader(HeadedCallReader):
    """Reader of a call `name\\n{…}`.

    The text turns out not to be a call at the first character at which it differs from all calls, so little
    of it is held back.
    """

    def _read_head(self, text: str) -> int:
        at = 0
        while at < len(text) and not self.started and not self.failed:
            at = self._read_character(text[at], at)
        return at

    def _read_character(self, character: str, at: int) -> int:
        """Read a character before the arguments, at index `at`; return the index to continue at."""
        name = self._head.rstrip(WHITESPACE)
        space = self._head[len(name) :]
        if character == "{" and "\n" in space and name in self._names:
            self._start(name)
            return at
        if character in WHITESPACE:
            possible = name in self._names and len(space) < MAX_SPACE
        else:
            longer = name + character
            possible = not space and any(known.startswith(longer) for known in self._names)
        if not possible:
            self.failed = True
            return at
        self._head += character
        return at + 1


class GlmParser(MarkerParser):
    """Parser of calls that begin with a line that is the name of a tool."""

    markers = (ASSISTANT, OBSERVATION)

    def __init__(self, tools: ArgumentSchemas, stop: tuple[str, ...] = ()) -> None:
        super().__init__(tools, stop)
        self._expecting = True

    def _parse_between_calls(self, text: str) -> str:
        if not self._expecting:
            marker, rest = self._content_until_marker(text)
            self._expecting = marker == ASSISTANT
            return rest
        at = skip_whitespace(text, 0)
        if at:
            self._output.add_content(text[:at])
            return text[at:]
        taken = self._take_marker(text)
        if taken is not None:
            return taken[1]
        self._reader = NameLineReader(self._names)
        return text

    def _call_ended(self, failed: bool) -> None:
        self._expecting = not failed
