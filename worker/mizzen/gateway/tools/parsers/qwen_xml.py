# SPDX-License-Identifier: Apache-2.0
"""Tool calls of Qwen3-Coder, Qwen 3.5 and Seed-OSS: tags for the function and for each argument.

    <tool_call>
    <function=weather>
    <parameter=city>
    Köln
    </parameter>
    </function>
    </tool_call>

Seed-OSS writes `<seed:tool_call>`. Values are not quoted: the tool's schema decides whether `5` is a number
or text.

Models also write faulty calls: they leave out `</parameter>`, or the `>` after a key (`<parameter=ids: 5`),
or write `</parameter/>`. `qwen_xml_tags` determines where a value ends in such calls.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from mizzen.gateway.tools.json_scanner import WHITESPACE
from mizzen.gateway.tools.parser_base import ArgumentSchemas, MarkerParser
from mizzen.gateway.tools.parsers.qwen_xml_tags import (
    CALL,
    CALL_END,
    FUNCTION,
    FUNCTION_END,
    MAX_NAME,
    PARAMETER,
    SEED_CALL,
    SEED_CALL_END,
    split_key,
    split_value,
)
from mizzen.gateway.tools.parsers.stepwise import StepwiseCallReader

PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


class XmlCallReader(StepwiseCallReader):
    """Reader of one call, from the text after `<function=`.

    The call starts once its name is that of a tool. The text of a string argument is returned as it arrives;
    an argument of another type is returned once it is complete.
    """

    line_breaks_around_values = True
    """True if a line break after the tag that opens a value is not part of the value."""

    def __init__(self, tools: ArgumentSchemas) -> None:
        super().__init__(tools)
        self._value_parts: list[str] = []
        self._schema: Any = None
        self._at_end = False

    def complete(self) -> tuple[str, str]:
        """End a started call at the end of the output; return what `add` returns."""
        self._at_end = True
        arguments, rest = self.add("")
        surplus = rest.strip(WHITESPACE)
        return arguments, "" if any(end.startswith(surplus) for end in (CALL_END, SEED_CALL_END)) else rest

    def _read_name(self, text: str) -> tuple[str, bool]:
        end = text.find(">", 0, MAX_NAME)
        if end < 0 and len(text) < MAX_NAME:
            return text, False
        if end >= 0 and text[:end] in self._tools:
            return self._start(text[:end], text[end + 1 :])
        return self._fail(text, end + 1 if end >= 0 else MAX_NAME)

    def _start(self, name: str, rest: str) -> tuple[str, bool]:
        """Start the call of the tool `name`; `rest` is the text after the name."""
        self._set_tool(name)
        self.started, self._step = True, self._read_between
        return rest, True

    def _read_between(self, text: str) -> tuple[str, bool]:
        text = text.lstrip(WHITESPACE)
        if text.startswith(PARAMETER):
            self._step = self._read_key
            return text[len(PARAMETER) :], True
        if text.startswith(FUNCTION_END):
            return self._end_call(text[len(FUNCTION_END) :])
        if not self._at_end and (PARAMETER.startswith(text) or FUNCTION_END.startswith(text)):
            return text, False
        return self._end_call(text)  # a call without its closing tag is still a call

    def _read_key(self, text: str) -> tuple[str, bool]:
        found = split_key(text, self._properties, at_end=self._at_end)
        if found is None:
            return text, False
        key, rest = found
        self._begin_argument(key)
        return rest, True

    def _begin_argument(self, key: str) -> None:
        """Write the key of an argument whose value follows."""
        self._new_arguments.append(self._key_as_json(key))
        self._keys.add(key)
        self._schema = self._properties.get(key)
        self._step = self._begin_value

    def _begin_value(self, text: str) -> tuple[str, bool]:
        """Skip the line break before a value, and choose the step that reads the value."""
        if not text and not self._at_end:
            return text, False
        is_text = not allowed_values(self._schema) and schema_types(self._schema) <= {"string"}
        self._new_arguments += ['"'] if is_text else []
        self._step = self._read_text if is_text else self._read_value
        return (text.removeprefix("\n") if self.line_breaks_around_values else text), True

    def _split_value(self, text: str) -> tuple[str, str | None, str]:
        """Return the next text of a value, the text after the value if it ends, and otherwise the rest."""
        unused = self._properties.keys() - self._keys if self._properties else None
        body, rest = split_value(text, unused, at_end=self._at_end)
        if rest is None and self._at_end:
            return body, "", ""
        return body, rest, text[len(body) :]

    def _read_text(self, text: str) -> tuple[str, bool]:
        body, rest, pending = self._split_value(text)
        self._new_arguments.append(json.dumps(body, ensure_ascii=False)[1:-1])
        if rest is None:
            return pending, False
        self._new_arguments.append('"')
        self._step = self._read_between
        return rest, True

    def _read_value(self, text: str) -> tuple[str, bool]:
        body, rest, pending = self._split_value(text)
        self._value_parts.append(body)
        if rest is None:
            return pending, False
        value, self._value_parts = "".join(self._value_parts), []
        self._new_arguments.append(value_as_json(value, self._schema))
        self._step = self._read_between
        return rest, True


class XmlParser(MarkerParser):
    """Parser of calls between tags, with content before, between and after the calls."""

    markers = (CALL, CALL_END, SEED_CALL, SEED_CALL_END, FUNCTION, FUNCTION_END)

    def _parse_between_calls(self, text: str) -> str:
        marker, rest = self._content_until_marker(text)
        if marker == FUNCTION:
            self._reader = XmlCallReader(self._tools)
        return rest

    def _call_ended(self, failed: bool) -> None:
        """Do nothing: nothing outside a call depends on the previous call."""


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
