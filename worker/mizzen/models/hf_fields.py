# SPDX-License-Identifier: Apache-2.0
"""Typed reads of the fields of a Hugging Face config.json, with errors that name the field."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHOWN = 200
"""Number of characters after which an error message truncates an invalid value."""


class ConfigError(ValueError):
    """A model's configuration is invalid or not supported; the message names the field and the remedy."""


def show_value(value: object) -> str:
    """Return a field's value for an error message; a long value is truncated."""
    shown = repr(value)
    return shown if len(shown) <= SHOWN else shown[:SHOWN] + "…"


def parse_object(content: str | bytes, source: str) -> dict[str, Any]:
    """Parse the content of a JSON file; `source` names the file in errors.

    Raises:
        ConfigError: the content is not a JSON object.
    """
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source} must contain a JSON object")
    return values


class Fields:
    """A JSON object of a config.json, with typed access to its fields."""

    def __init__(self, values: dict[str, Any], source: str = "config.json") -> None:
        self.values = values
        self.source = source

    @classmethod
    def load(cls, folder: Path, name: str = "config.json") -> Fields:
        """Read the JSON file `name` of a model folder.

        Raises:
            ConfigError: the file is missing, cannot be read or does not contain a JSON object.
        """
        path = folder / name
        try:
            content = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(f"{folder} has no {name}: give the folder of a model") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        return cls(parse_object(content, str(path)), str(path))

    def error(self, name: str, rule: str) -> ConfigError:
        """Return an error that names a field, the `rule` it violates ("must be true"), and its value."""
        value = self.values.get(name)
        return ConfigError(
            f"{self.source}: {name} {rule}" + ("" if value is None else f", not {show_value(value)}")
        )

    def unsupported(self, name: str, reason: str) -> ConfigError:
        """Return an error that names a field and says why its model is not supported, without its value."""
        return ConfigError(f"{self.source}: {name} {reason}")

    def first_set(self, names: Sequence[str]) -> str:
        """Return the first of the fields `names` that is set; the first of them if none is set."""
        return next((name for name in names if self.values.get(name) is not None), names[0])

    def integer(self, name: str, default: int | None = None) -> int:
        """Read a positive integer; without a default the field is required.

        Raises:
            ConfigError: the field is missing or not a positive integer.
        """
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, "must be a positive integer")
        return value

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """Read a positive integer or null; a missing field has the default value.

        Raises:
            ConfigError: the field is neither null nor a positive integer.
        """
        return None if self.values.get(name, default) is None else self.integer(name, default)

    def number(self, name: str, default: float | None = None) -> float:
        """Read a positive number; without a default the field is required.

        Raises:
            ConfigError: the field is missing or not a positive number.
        """
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(name, "must be a positive number")
        return float(value)

    def optional_number(self, name: str, default: float | None) -> float | None:
        """Read a positive number or null; a missing field has the default value.

        Raises:
            ConfigError: the field is neither null nor a positive number.
        """
        return None if self.values.get(name, default) is None else self.number(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        """Read a boolean; a missing or null field has the default value.

        Raises:
            ConfigError: the field is not a boolean.
        """
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def strings(self, name: str) -> list[str]:
        """Read the strings of a list; other elements are left out, and another value has none."""
        value = self.values.get(name)
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []

    def child(self, name: str) -> Fields:
        """Read a nested object; a missing or null field yields an empty object.

        Raises:
            ConfigError: the field is not an object.
        """
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return Fields(value or {}, f"{self.source}: {name}")
