# SPDX-License-Identifier: Apache-2.0
"""Tool calls in the syntax of Python: `weather(city="Köln", days=2)`.

| class | models | syntax |
|---|---|---|
| `PythonicParser` | templates for Llama 4 and Gemma 3 | `[f(a=1), g(b="x")]` as the whole answer |
| `OlmoParser` | OLMo 3 | `<function_calls>f(a=1)\\ng(b="x")</function_calls>` |

Values are literals of Python or JSON. Each argument is returned once it is complete.
"""

from __future__ import annotations

import json
import re

from mizzen.gateway.tools.json_scanner import WHITESPACE
from mizzen.gateway.tools.parser_base import ArgumentSchemas, ToolCallReader
from mizzen.gateway.tools.parsers.lists import BareListParser, ElementScanner
from mizzen.gateway.tools.parsers.named import NAME_START
from mizzen.gateway.tools.parsers.python_values import LiteralScanner, literal_as_json
from mizzen.gateway.tools.parsers.stepwise import StepwiseCallReader

MAX_NAME = 256
"""Maximum length of the name of a tool or of a key, in characters."""
_NAME = re.compile(r"[\w.-]+", re.ASCII)
_HEAD = re.compile(r"[\w.-]+\(", re.ASCII)
_KEY = re.compile(r"(\w{1,200})\s{0,16}=(?!=)")
_MAYBE_KEY = re.compile(r"\w{0,200}\s{0,16}=?")


class PythonCallReader(StepwiseCallReader):
    """Reader of one call `name(key=value, …)`.

    The call starts once its name is that of a tool and its first argument has a key, or it has no arguments.
    Values without a key, after an argument that has one, get the keys that the tool describes, in order.
    `**{…}` passes the keys of a JSON object.
    """

    def __init__(self, tools: ArgumentSchemas) -> None:
        super().__init__(tools)
        self._scanner = LiteralScanner()
        self._value: list[str] = []
        self._key: str | None = None
        """Key of the argument whose value is read; None for `**{…}`."""

    def complete(self) -> tuple[str, str]:
        """Leave the call incomplete; return the last argument as the model wrote it so far."""
        if self._step != self._read_value:
            return "", ""
        value, self._value = "".join(self._value).lstrip(WHITESPACE), []
        if self._key is None:
            return (value if not self._keys else ", " + value.removeprefix("{")), ""
        return self._key_as_json(self._key) + value, ""

    def _read_name(self, text: str) -> tuple[str, bool]:
        found = _NAME.match(text)
        end = found.end() if found is not None else 0
        if end == len(text) and end < MAX_NAME:
            return text, False
        if end > MAX_NAME or text[end : end + 1] != "(" or text[:end] not in self._tools:
            return self._fail(text, min(end, MAX_NAME))
        self._set_tool(text[:end])
        self._raw, self._step = text[: end + 1], self._read_argument
        return text[end + 1 :], True

    def _read_argument(self, text: str) -> tuple[str, bool]:
        """Read the key of an argument, or the end of the call."""
        body = text.lstrip(WHITESPACE)
        if not self.started:
            self._raw += text[: len(text) - len(body)]
        text = body  # white space is read once, however long it is
        if body.startswith(")"):
            return self._end_call(body[1:])
        if body.startswith("**"):
            self._key = None
            return self._begin_value(body[2:])
        found = _KEY.match(body)
        if found is not None and found.end() < len(body):
            self._key = found[1]
            return self._begin_value(body[found.end() :])
        if body == "*" or _MAYBE_KEY.fullmatch(body):
            return text, False
        if not self.started:
            return self._fail(text, 0)
        unused = (key for key in self._properties if key not in self._keys)
        self._key = next(unused, f"argument_{len(self._keys) + 1}")
        return self._begin_value(body)

    def _begin_value(self, rest: str) -> tuple[str, bool]:
        self.started, self._raw = True, ""
        self._scanner, self._value = LiteralScanner(), []
        self._step = self._read_value
        return rest, True

    def _read_value(self, text: str) -> tuple[str, bool]:
        end = self._scanner.scan(text, 0)
        self._value.append(text[:end])
        if not self._scanner.done:
            return "", False
        self._add_argument("".join(self._value))
        self._step = self._read_argument
        return text[end + 1 :] if text[end] == "," else text[end:], True

    def _add_argument(self, value: str) -> None:
        """Write an argument. A key that the call has already set is not written a second time."""
        written = literal_as_json(value)
        if self._key is not None:
            members = {self._key: written}
        else:
            members = _object_members(written)
            if members is None:  # no object: the value gets a key, so that it is not lost
                members = {f"argument_{len(self._keys) + 1}": written}
            elif not self._keys and members:  # the usual case: keep the text as it is
                self._keys = set(members)
                self._new_arguments.append(written[:-1].rstrip(WHITESPACE))
                return
        for key, text in members.items():
            if key not in self._keys:
                self._new_arguments.append(self._key_as_json(key) + text)
                self._keys.add(key)


def looks_like_call(text: str) -> bool:
    """Return whether a text is `name(…)` and nothing else; what the brackets enclose is not checked."""
    head = _HEAD.match(text)
    if head is None:
        return False
    scanner = LiteralScanner(ends=")")
    end = scanner.scan(text, head.end())
    return scanner.done and not text[end + 1 :].strip(WHITESPACE)


def _object_members(text: str) -> dict[str, str] | None:
    """Return the members of a JSON object as JSON; None if the text is no object, or nested too deep."""
    if not text.startswith("{"):
        return None
    try:
        return {key: json.dumps(value, ensure_ascii=False) for key, value in json.loads(text).items()}
    except (ValueError, RecursionError):
        return None


class PythonicParser(BareListParser):
    """Parser of a list of calls that is the whole answer; `<|python_tag|>` and similar tags are dropped."""

    markers = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")

    def _create_reader(self, first: str) -> ToolCallReader | None:
        return PythonCallReader(self._tools) if self._in_list and NAME_START.match(first) else None

    def _scan_elements(self) -> ElementScanner:
        return LiteralScanner(ends=",]")

    def _looks_like_call(self, element: str) -> bool:
        return looks_like_call(element)


class LineScanner:
    """Incremental scanner that finds the end of a line."""

    def __init__(self) -> None:
        self.done = False

    def scan(self, text: str, at: int) -> int:
        """Return the index of the line break in `text[at:]`, or the length of the text."""
        end = text.find("\n", at)
        self.done = end >= 0
        return end if self.done else len(text)


class OlmoParser(BareListParser):
    """Parser of calls between `<function_calls>` and `</function_calls>`, each on a line."""

    begins = ("<function_calls>",)
    ends = ("</function_calls>",)
    markers = (*begins, *ends)

    def _create_reader(self, first: str) -> ToolCallReader | None:
        return PythonCallReader(self._tools) if NAME_START.match(first) else None

    def _scan_elements(self) -> ElementScanner:
        return LineScanner()

    def _looks_like_call(self, element: str) -> bool:
        return looks_like_call(element)

    def _call_ended(self, failed: bool) -> None:
        super()._call_ended(failed)
        self._in_calls = True
