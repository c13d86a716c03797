# SPDX-License-Identifier: Apache-2.0
"""Mistral's tool calls, which follow `[TOOL_CALLS]`."""

from __future__ import annotations

import re

from mizzen.gateway.tools.parser_base import ToolCallReader
from mizzen.gateway.tools.parsers.lists import BareListParser
from mizzen.gateway.tools.parsers.named import NAME_START, NamedCallReader

MARKER, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_HEAD = re.compile(r"([\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*", re.ASCII)


class MistralParser(BareListParser):
    """Parser of `[TOOL_CALLS]` followed by a list of JSON objects, or by calls that begin with a name."""

    begins = (MARKER,)
    markers = (MARKER, CALL_ID, ARGUMENTS)

    def _create_reader(self, first: str) -> ToolCallReader | None:
        if not self._in_list and NAME_START.match(first):
            return NamedCallReader(self._names, _HEAD)
        return super()._create_reader(first)
