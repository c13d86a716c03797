# SPDX-License-Identifier: Apache-2.0
"""Argument types and help format that benchmarks share, and conversion of results to JSON."""

from __future__ import annotations

import argparse
import math
from typing import Any


class Help(argparse.RawDescriptionHelpFormatter):
    """Help formatter that keeps the line breaks of the description and adds the default of each option."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if not action.help or default is None or default is False or default in ([], argparse.SUPPRESS):
            return action.help
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
        return f"{action.help} (default: {shown.replace('%', '%%')})"


def given_options(parser: argparse.ArgumentParser) -> set[str]:
    """Return the names of all options on the command line, including options set to their default values."""
    defaults = {name: parser.get_default(name) for name in vars(parser.parse_args())}
    parser.set_defaults(**dict.fromkeys(defaults))
    given = {name for name, value in vars(parser.parse_args()).items() if value is not None}
    parser.set_defaults(**defaults)
    return given


def integer(text: str, least: int) -> int:
    """Parse an integer of at least `least`.

    Raises:
        argparse.ArgumentTypeError: the text is not such an integer.
    """
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
    return value


def positive(text: str) -> int:
    """Parse an integer above 0."""
    return integer(text, 1)


def natural(text: str) -> int:
    """Parse an integer that is 0 or more."""
    return integer(text, 0)


def number(text: str) -> float:
    """Parse a number that is not NaN."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def above_zero(text: str) -> float:
    """Parse a finite number above 0."""
    value = number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0")
    return value


def not_negative(text: str) -> float:
    """Parse a finite number that is 0 or more."""
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must not be below 0")
    return value


def jsonable(value: Any) -> Any:
    """Return `value` with None in place of infinite and NaN numbers, which JSON does not have."""
    if isinstance(value, dict):
        return {name: jsonable(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
