"""Qwen's and Hermes' form: `<tool_call>` and `</tool_call>` around a JSON object."""

from __future__ import annotations

from collections.abc import Collection

from mizzen.gateway.tools.json_scanner import WHITESPACE
from mizzen.gateway.tools.parser_base import MarkedParser

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(MarkedParser):
    """Reads calls between tags, with content before, between and behind them."""

    markers = (BEGIN, END)

    def __init__(self, names: Collection[str], stop: tuple[str, ...] = ()) -> None:
        super().__init__(names, stop)
        self._closing = False

    def _between(self, text: str) -> str:
        if self._closing:  # one brace too many is common, and no content
            text = text.lstrip(WHITESPACE + "}")
            self._closing = not text
        marker, rest = self._until_marker(text)
        if marker == BEGIN:
            self._read_object()
        return rest

    def _ended(self, failed: bool) -> None:
        self._closing = not failed
