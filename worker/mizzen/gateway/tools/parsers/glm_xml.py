# SPDX-License-Identifier: Apache-2.0
"""Tool calls of GLM-4.5 and later: a name, and tags for the key and the value of each argument.

    <tool_call>weather
    <arg_key>city</arg_key>
    <arg_value>Köln</arg_value>
    </tool_call>

Text values are not quoted: the tool's schema decides whether `5` is a number or text.
"""

from __future__ import annotations

import re

from mizzen.gateway.text.stop import partial_match_length
from mizzen.gateway.tools.json_scanner import WHITESPACE
from mizzen.gateway.tools.parser_base import MarkerParser
from mizzen.gateway.tools.parsers.qwen_xml import XmlCallReader
from mizzen.gateway.tools.parsers.qwen_xml_tags import CALL, CALL_END, MAX_NAME

KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
TAGS = (CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END)
_NAME_END = re.compile(r"[\n<]")


class GlmCallReader(XmlCallReader):
    """Reader of one call, from the text after `<tool_call>`."""

    line_breaks_around_values = False
    _next_key = ""
    """Key whose value has not begun."""

    def _read_name(self, text: str) -> tuple[str, bool]:
        begin = len(text) - len(text.lstrip(WHITESPACE))
        found = _NAME_END.search(text, begin, MAX_NAME)
        if found is None:
            return (text, False) if len(text) < MAX_NAME else self._fail(text, MAX_NAME)
        name = text[begin : found.start()].strip(WHITESPACE)
        if name in self._tools:
            return self._start(name, text[found.start() :])
        return self._fail(text, found.start())

    def _read_between(self, text: str) -> tuple[str, bool]:
        text = text.lstrip(WHITESPACE)
        if text.startswith(KEY):
            self._step = self._read_key
            return text[len(KEY) :], True
        if text.startswith(CALL_END):
            return self._end_call(text[len(CALL_END) :])
        if not self._at_end and (KEY.startswith(text) or CALL_END.startswith(text)):
            return text, False
        return self._end_call(text)  # a call without its closing tag is still a call

    def _read_key(self, text: str) -> tuple[str, bool]:
        end = text.find(KEY_END, 0, MAX_NAME)
        if end < 0 and len(text) < MAX_NAME and not self._at_end:
            return text, False
        if end < 0:
            return self._end_call(text[MAX_NAME:])
        self._next_key, self._step = text[:end].strip(), self._read_value_tag
        return text[end + len(KEY_END) :], True

    def _read_value_tag(self, text: str) -> tuple[str, bool]:
        text = text.lstrip(WHITESPACE)
        if text.startswith(VALUE):
            self._begin_argument(self._next_key)
            return text[len(VALUE) :], True
        if VALUE.startswith(text) and not self._at_end:
            return text, False
        return self._end_call(text)

    def _split_value(self, text: str) -> tuple[str, str | None, str]:
        end = text.find(VALUE_END)
        if end >= 0:
            return text[:end], text[end + len(VALUE_END) :], ""
        cut = len(text) - partial_match_length(text, VALUE_END)
        return (text[:cut], "", "") if self._at_end else (text[:cut], None, text[cut:])


class GlmXmlParser(MarkerParser):
    """Parser of calls between tags, with content before, between and after the calls."""

    markers = (CALL, CALL_END)

    def _parse_between_calls(self, text: str) -> str:
        marker, rest = self._content_until_marker(text)
        if marker == CALL:
            self._reader = GlmCallReader(self._tools)
        return rest

    def _call_ended(self, failed: bool) -> None:
        """Do nothing: nothing outside a call depends on the previous call."""
