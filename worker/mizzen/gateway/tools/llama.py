"""Llama 3's form: the answer is a JSON object, or several with `;` between; `<|python_tag|>` may be first."""

from __future__ import annotations

from collections.abc import Collection

from mizzen.gateway.tools.json_scanner import skip_whitespace
from mizzen.gateway.tools.parser_base import MarkedParser

TAG = "<|python_tag|>"


class LlamaParser(MarkedParser):
    """Reads calls at the start of an answer, behind another call, and behind the tag."""

    markers = (TAG,)

    def __init__(self, names: Collection[str], stop: tuple[str, ...] = ()) -> None:
        super().__init__(names, stop)
        self._expecting = True
        self._behind_call = False

    def _between(self, text: str) -> str:
        if not self._expecting:
            marker, rest = self._until_marker(text)
            self._expecting = bool(marker)
            return rest
        at = skip_whitespace(text, 0)
        if at:
            self._found.content(text[:at])
            return text[at:]
        if text.startswith(TAG):
            return text[len(TAG) :]
        if TAG.startswith(text):
            self._held = text
            return ""
        if text[0] == "{":
            self._read_object()
            return text
        if self._behind_call and text[0] in ";,}":
            return text[1:]
        self._expecting = False
        return text

    def _ended(self, failed: bool) -> None:
        self._expecting = self._behind_call = not failed
