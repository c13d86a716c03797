# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Hermes and Qwen: a JSON object between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from mizzen.gateway.tools.json_scanner import WHITESPACE
from mizzen.gateway.tools.parser_base import ArgumentSchemas, MarkerParser

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(MarkerParser):
    """Parser of calls between tags, with content before, between and after the calls."""

    markers = (BEGIN, END)

    def __init__(self, tools: ArgumentSchemas, stop: tuple[str, ...] = ()) -> None:
        super().__init__(tools, stop)
        self._closing = False

    def _parse_between_calls(self, text: str) -> str:
        if self._closing:  # a surplus closing brace is common and not content
            text = text.lstrip(WHITESPACE + "}")
            self._closing = not text
        marker, rest = self._content_until_marker(text)
        if marker == BEGIN:
            self._expect_object()
        return rest

    def _call_ended(self, failed: bool) -> None:
        self._closing = not failed
