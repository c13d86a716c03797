"""The newer form of Qwen's models (Qwen3-Coder, 3.5 and on): tags for the function and each argument.

    <tool_call>
    <function=weather>
    <parameter=city>
    Köln
    </parameter>
    </function>
    </tool_call>

Values stand as they are: whether `5` is a number or text, the tool's schema says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from mizzen.gateway.text.stop import partial
from mizzen.gateway.tools.json_scanner import WHITESPACE
from mizzen.gateway.tools.parser_base import MarkedParser

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_NAME = 256
"""Characters of a name."""
PYTHON = {"True": "true", "False": "false", "None": "null"}

Schemas = Mapping[str, Any]
"""JSON schemas of tools' arguments, by the tools' names."""


class XmlReader:
    """Reads one call, from behind `<function=`; the interface is `CallReader`'s.

    A call begins with its name. Arguments of text are given on as they come, others at their ends.
    """

    def __init__(self, tools: Schemas) -> None:
        self._tools = tools
        self._step = self._name
        self._held = self._raw = ""
        self._parts: list[str] = []
        self._given: list[str] = []
        self._count = 0
        self._schema: Any = None
        self.name: str | None = None
        self.started = False
        self.failed = False
        self.ended = False

    @property
    def whole(self) -> bool:
        """Whether the arguments are all there."""
        return self.ended

    @property
    def raw(self) -> str:
        """What was read, as long as no call has begun."""
        return self._raw or self._held

    def add(self, text: str) -> tuple[str, str]:
        """See `CallReader.add`."""
        text, self._held = self._held + text, ""
        more = True
        while more and not self.ended:
            text, more = self._step(text)
        if not self.ended:
            self._held, text = text, ""
        given, self._given = "".join(self._given), []
        return given, text

    # Each step takes text and returns the rest, and whether to go on: not where more text must come first.

    def _name(self, text: str) -> tuple[str, bool]:
        end = text.find(">", 0, MAX_NAME)
        if end < 0 and len(text) < MAX_NAME:
            return text, False
        if end >= 0 and text[:end] in self._tools:
            self.name, self.started, self._step = text[:end], True, self._between
            return text[end + 1 :], True
        cut = end + 1 if end >= 0 else MAX_NAME
        self.failed = self.ended = True
        self._raw = text[:cut]
        return text[cut:], False

    def _between(self, text: str) -> tuple[str, bool]:
        text = text.lstrip(WHITESPACE)
        if text.startswith(PARAMETER):
            self._step = self._key
            return text[len(PARAMETER) :], True
        if text.startswith(FUNCTION_END):
            return self._end(text[len(FUNCTION_END) :])
        if PARAMETER.startswith(text) or FUNCTION_END.startswith(text):
            return text, False
        return self._end(text)  # a call whose end is missing is a call all the same

    def _key(self, text: str) -> tuple[str, bool]:
        end = text.find(">", 0, MAX_NAME)
        if end < 0:
            return self._end(text) if len(text) >= MAX_NAME else (text, False)
        key, rest = text[:end], text[end + 1 :]
        self._given.append(("{" if self._count == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._count += 1
        self._schema = properties(self._tools.get(self.name or "")).get(key)
        self._step = self._first
        return rest, True

    def _first(self, text: str) -> tuple[str, bool]:
        """Leave out the line break before a value."""
        if not text:
            return text, False
        is_text = not choices(self._schema) and types(self._schema) <= {"string"}
        self._given += ['"'] if is_text else []
        self._step = self._text if is_text else self._value
        return text.removeprefix("\n"), True

    def _text(self, text: str) -> tuple[str, bool]:
        body, rest = until_end(text)
        self._given.append(json.dumps(body, ensure_ascii=False)[1:-1])
        if rest is None:
            return text[len(body) :], False
        self._given.append('"')
        self._step = self._between
        return rest, True

    def _value(self, text: str) -> tuple[str, bool]:
        body, rest = until_end(text)
        self._parts.append(body)
        if rest is None:
            return text[len(body) :], False
        whole, self._parts = "".join(self._parts), []
        self._given.append(as_json(whole, self._schema))
        self._step = self._between
        return rest, True

    def _end(self, rest: str) -> tuple[str, bool]:
        self._given.append("}" if self._count else "{}")
        self.ended = True
        return rest, False


class XmlParser(MarkedParser):
    """Reads calls between tags, with content before, between and behind them."""

    markers = (CALL, CALL_END, FUNCTION, FUNCTION_END)

    def __init__(self, tools: Schemas, stop: tuple[str, ...] = ()) -> None:
        super().__init__(tools, stop)
        self._tools = tools

    def _between(self, text: str) -> str:
        marker, rest = self._until_marker(text)
        if marker == FUNCTION:
            self._reader = XmlReader(self._tools)
        return rest

    def _ended(self, failed: bool) -> None:
        """Nothing is to be noted: each call has its own tags."""


def until_end(text: str) -> tuple[str, str | None]:
    """Return a value up to the line break before its closing tag, and what is behind the tag.

    Without the tag, the value is what certainly belongs to it, and there is nothing behind it.
    """
    at = text.find(PARAMETER_END)
    if at >= 0:
        return text[:at].removesuffix("\n"), text[at + len(PARAMETER_END) :]
    keep = max(partial(text, "\n" + PARAMETER_END), partial(text, PARAMETER_END))
    return text[: len(text) - keep], None


def properties(schema: Any) -> Mapping[str, Any]:
    """Return the schemas of an object's properties."""
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


def types(schema: Any) -> set[str]:
    """Return the types that a schema names, those of its alternatives included; none when it names none."""
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type")
    if given is not None:
        return {given} if isinstance(given, str) else {one for one in given if isinstance(one, str)}
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(alternatives, list):
        return {one for alternative in alternatives for one in types(alternative)}
    return {"value"} if "$ref" in schema else set()


def choices(schema: Any) -> list[Any]:
    """Return the values that a schema allows, where it lists them."""
    if not isinstance(schema, dict):
        return []
    found = schema.get("enum")
    return found if isinstance(found, list) else [schema["const"]] if "const" in schema else []


def as_json(text: str, schema: Any) -> str:
    """Return a value's text as JSON: as it stands where that is JSON of another type than text."""
    body, allowed = text.strip(WHITESPACE), types(schema)
    listed = choices(schema)
    if body in listed:
        return json.dumps(body, ensure_ascii=False)
    body = PYTHON.get(body, body)
    if listed or "string" not in allowed or (body == "null" and "null" in allowed):
        try:
            msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError):
            pass
        else:
            return body
    return json.dumps(text, ensure_ascii=False)
