# SPDX-License-Identifier: Apache-2.0
"""Self-describing fields of configuration dataclasses: each field has a help text, choices and bounds.

Command line options are generated from these fields, so an option and its field cannot differ.
"""

from __future__ import annotations

import dataclasses
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """Declare a field of a configuration dataclass; the bounds `low` and `high` are inclusive."""
    metadata = {"help": help, "choices": choices, "low": low, "high": high}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def required(help: str) -> Any:
    """Declare a field of a configuration dataclass that has no default."""
    return option(dataclasses.MISSING, help)


def flag(name: str) -> str:
    """Return the command line option of a field, e.g. `--page-size` for `page_size`."""
    return "--" + name.replace("_", "-")


def check(config: Any) -> None:
    """Check the choices and bounds of every declared field of a configuration.

    Raises:
        ValueError: a value is not allowed; the message names the option, its value and the allowed values.
    """
    for field in dataclasses.fields(config):
        value, rules = getattr(config, field.name), field.metadata
        if value is None or not rules:
            continue
        if rules["choices"] and value not in rules["choices"]:
            raise ValueError(
                f"{flag(field.name)} must be one of {', '.join(rules['choices'])}, not {value!r}"
            )
        if rules["low"] is not None and value < rules["low"]:
            raise ValueError(f"{flag(field.name)} must be at least {rules['low']}, not {value}")
        if rules["high"] is not None and value > rules["high"]:
            raise ValueError(f"{flag(field.name)} must be at most {rules['high']}, not {value}")
