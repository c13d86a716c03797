# SPDX-License-Identifier: Apache-2.0
"""Finds out which field of an object cannot be parsed. `parse.py` calls this after a failed parse.

The object is parsed again from dictionaries that record the path of each field that is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def join_path(path: str, name: str) -> str:
    """Return the path of an object's field; `path` is the object's own path, empty for the outermost one."""
    return f"{path}.{name}" if path else name


class _MissingField(Exception):
    """A required field is missing; the message is its path."""


class _RecordingDict(dict[str, Any]):
    """A dictionary that records the path of each value that is read from it."""

    def __init__(self, content: Mapping[str, Any], path: str, last: list[str]) -> None:
        super().__init__(content)
        self._path, self._last = path, last

    def __getitem__(self, name: str) -> Any:
        path = join_path(self._path, name)
        self._last[:] = [path]
        if name not in self:
            raise _MissingField(path)
        return _record_reads(super().__getitem__(name), path, self._last)

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]


def _record_reads(value: Any, path: str, last: list[str]) -> Any:
    if isinstance(value, dict):
        return _RecordingDict(value, path, last)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, list):
        items: list[Any] = value
        return [_record_reads(item, f"{path}[{number}]", last) for number, item in enumerate(items)]
    return value


def describe_field_error(read: Callable[[Mapping[str, Any]], object], body: Mapping[str, Any]) -> str:
    """Describe which field of an object is invalid, and why.

    Args:
        read: parser that has failed on the object; it is called again.
        body: the object.
    """
    last = ["the object"]
    try:
        read(_RecordingDict(body, "", last))
    except _MissingField as error:
        return f"{error} is missing"
    except ValueError as error:
        return f"{last[0]}: {error}"
    except (TypeError, AttributeError, KeyError):
        return f"{last[0]} has the wrong type"
    return "the object cannot be parsed"
