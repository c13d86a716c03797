"""Tool calls of Qwen3-Coder, and of Qwen 3.5 and later: tags for the function and for each argument.

    <tool_call>
    <function=weather>
    <parameter=city>
    Köln
    </parameter>
    </function>
    </tool_call>

Values are not quoted: the tool's schema decides whether `5` is a number or text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from mizzen.gateway.text.stop import partial_match_length
from mizzen.gateway.tools.json_scanner import WHITESPACE
from mizzen.gateway.tools.parser_base import MarkerParser

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_NAME = 256
"""Maximum length of the name of a function or parameter, in characters."""
PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}

ArgumentSchemas = Mapping[str, Any]
"""JSON schemas of the tools' arguments by tool name."""


class XmlCallReader:
    """Reader of one call, from the text after `<function=`, with the interface of `CallReader`.

    The call starts once its name is that of a tool. The text of a string argument is returned as it arrives;
    an argument of another type is returned once it is complete.
    """

    def __init__(self, tools: ArgumentSchemas) -> None:
        self._tools = tools
        self._step = self._read_name
        self._pending = self._raw = ""
        self._value_parts: list[str] = []
        self._new_arguments: list[str] = []
        self._count = 0
        self._schema: Any = None
        self.name: str | None = None
        self.started = False
        self.failed = False
        self.ended = False

    @property
    def arguments_complete(self) -> bool:
        """True if the arguments are complete."""
        return self.ended

    @property
    def raw(self) -> str:
        """Text read before the call started, or before the text turned out not to be a call."""
        return self._raw or self._pending

    def add(self, text: str) -> tuple[str, str]:
        """Read more text; return the new text of the arguments, and the text after the call."""
        text, self._pending = self._pending + text, ""
        more = True
        while more and not self.ended:
            text, more = self._step(text)
        if not self.ended:
            self._pending, text = text, ""
        new_arguments, self._new_arguments = "".join(self._new_arguments), []
        return new_arguments, text

    # Each step reads some of the text, and returns the text that is left and whether to continue with it.
    # It returns False if it needs more text.

    def _read_name(self, text: str) -> tuple[str, bool]:
        end = text.find(">", 0, MAX_NAME)
        if end < 0 and len(text) < MAX_NAME:
            return text, False
        if end >= 0 and text[:end] in self._tools:
            self.name, self.started, self._step = text[:end], True, self._read_between
            return text[end + 1 :], True
        cut = end + 1 if end >= 0 else MAX_NAME
        self.failed = self.ended = True
        self._raw = text[:cut]
        return text[cut:], False

    def _read_between(self, text: str) -> tuple[str, bool]:
        text = text.lstrip(WHITESPACE)
        if text.startswith(PARAMETER):
            self._step = self._read_key
            return text[len(PARAMETER) :], True
        if text.startswith(FUNCTION_END):
            return self._end_call(text[len(FUNCTION_END) :])
        if PARAMETER.startswith(text) or FUNCTION_END.startswith(text):
            return text, False
        return self._end_call(text)  # a call without its closing tag is still a call

    def _read_key(self, text: str) -> tuple[str, bool]:
        end = text.find(">", 0, MAX_NAME)
        if end < 0:
            return self._end_call(text) if len(text) >= MAX_NAME else (text, False)
        key, rest = text[:end], text[end + 1 :]
        self._new_arguments.append(
            ("{" if self._count == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        )
        self._count += 1
        self._schema = property_schemas(self._tools.get(self.name or "")).get(key)
        self._step = self._begin_value
        return rest, True

    def _begin_value(self, text: str) -> tuple[str, bool]:
        """Skip the line break before a value, and choose the step that reads the value."""
        if not text:
            return text, False
        is_text = not allowed_values(self._schema) and schema_types(self._schema) <= {"string"}
        self._new_arguments += ['"'] if is_text else []
        self._step = self._read_text if is_text else self._read_value
        return text.removeprefix("\n"), True

    def _read_text(self, text: str) -> tuple[str, bool]:
        body, rest = split_at_end_tag(text)
        self._new_arguments.append(json.dumps(body, ensure_ascii=False)[1:-1])
        if rest is None:
            return text[len(body) :], False
        self._new_arguments.append('"')
        self._step = self._read_between
        return rest, True

    def _read_value(self, text: str) -> tuple[str, bool]:
        body, rest = split_at_end_tag(text)
        self._value_parts.append(body)
        if rest is None:
            return text[len(body) :], False
        value, self._value_parts = "".join(self._value_parts), []
        self._new_arguments.append(value_as_json(value, self._schema))
        self._step = self._read_between
        return rest, True

    def _end_call(self, rest: str) -> tuple[str, bool]:
        self._new_arguments.append("}" if self._count else "{}")
        self.ended = True
        return rest, False


class XmlParser(MarkerParser):
    """Parser of calls between tags, with content before, between and after the calls."""

    markers = (CALL, CALL_END, FUNCTION, FUNCTION_END)

    def __init__(self, tools: ArgumentSchemas, stop: tuple[str, ...] = ()) -> None:
        super().__init__(tools, stop)
        self._tools = tools

    def _parse_between_calls(self, text: str) -> str:
        marker, rest = self._content_until_marker(text)
        if marker == FUNCTION:
            self._reader = XmlCallReader(self._tools)
        return rest

    def _call_ended(self, failed: bool) -> None:
        """Do nothing: nothing outside a call depends on the previous call."""


def split_at_end_tag(text: str) -> tuple[str, str | None]:
    """Split text at the closing tag of a value; return the value and the text after the tag.

    A line break right before the tag is not part of the value. If the closing tag is not complete yet,
    return the text that certainly belongs to the value, and None.
    """
    at = text.find(PARAMETER_END)
    if at >= 0:
        return text[:at].removesuffix("\n"), text[at + len(PARAMETER_END) :]
    keep = max(partial_match_length(text, "\n" + PARAMETER_END), partial_match_length(text, PARAMETER_END))
    return text[: len(text) - keep], None


def property_schemas(schema: Any) -> Mapping[str, Any]:
    """Return the schemas of the properties that an object schema describes, by property name."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def schema_types(schema: Any) -> set[str]:
    """Return the types that a schema or its alternatives name; the set is empty if they name none.

    A `$ref`, which is not resolved, counts as the type `value`.
    """
    if not isinstance(schema, dict):
        return set()
    names = schema.get("type")
    if names is not None:
        return {names} if isinstance(names, str) else {name for name in names if isinstance(name, str)}
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(alternatives, list):
        return {name for alternative in alternatives for name in schema_types(alternative)}
    return {"value"} if "$ref" in schema else set()


def allowed_values(schema: Any) -> list[Any]:
    """Return the values that a schema lists with `enum` or `const`; empty if it lists none."""
    if not isinstance(schema, dict):
        return []
    values = schema.get("enum")
    return values if isinstance(values, list) else [schema["const"]] if "const" in schema else []


def value_as_json(text: str, schema: Any) -> str:
    """Return the JSON text of an argument that is written without quotes.

    Valid JSON stays unchanged unless the schema expects a string; all other text becomes a JSON string.
    """
    body, allowed = text.strip(WHITESPACE), schema_types(schema)
    listed = allowed_values(schema)
    if body in listed:
        return json.dumps(body, ensure_ascii=False)
    body = PYTHON_LITERALS.get(body, body)
    if listed or "string" not in allowed or (body == "null" and "null" in allowed):
        try:
            msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError):
            pass
        else:
            return body
    return json.dumps(text, ensure_ascii=False)
