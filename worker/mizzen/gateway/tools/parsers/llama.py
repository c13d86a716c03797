# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Llama 3: JSON objects separated by `;`, optionally after `<|python_tag|>`."""

from __future__ import annotations

from mizzen.gateway.tools.json_scanner import skip_whitespace
from mizzen.gateway.tools.parser_base import ArgumentSchemas, MarkerParser

TAG = "<|python_tag|>"


class LlamaParser(MarkerParser):
    """Parser of calls; a call is at the start of the output, after another call, or after `TAG`."""

    markers = (TAG,)

    def __init__(self, tools: ArgumentSchemas, stop: tuple[str, ...] = ()) -> None:
        super().__init__(tools, stop)
        self._expecting = True
        self._after_call = False

    def _parse_between_calls(self, text: str) -> str:
        if not self._expecting:
            marker, rest = self._content_until_marker(text)
            self._expecting = bool(marker)
            return rest
        at = skip_whitespace(text, 0)
        if at:
            self._output.add_content(text[:at])
            return text[at:]
        taken = self._take_marker(text)
        if taken is not None:
            return taken[1]
        if text[0] == "{":
            self._expect_object()
            return text
        if self._after_call and text[0] in ";,}":
            return text[1:]
        self._expecting = False
        return text

    def _call_ended(self, failed: bool) -> None:
        self._expecting = self._after_call = not failed
