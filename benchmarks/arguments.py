"""What benchmarks read from their command line, checked there, and how their results become JSON."""

from __future__ import annotations

import argparse
import math
from typing import Any


class Help(argparse.RawDescriptionHelpFormatter):
    """Shows the whole docstring as it stands, and the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if not action.help or default is None or default is False or default in ([], argparse.SUPPRESS):
            return action.help
        told = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
        return f"{action.help} (default: {told.replace('%', '%%')})"


def given(made: argparse.ArgumentParser) -> set[str]:
    """Return the names of the options that the command line gives, whatever their values."""
    usual = {name: made.get_default(name) for name in vars(made.parse_args())}
    made.set_defaults(**dict.fromkeys(usual))
    found = {name for name, value in vars(made.parse_args()).items() if value is not None}
    made.set_defaults(**usual)
    return found


def whole(text: str, least: int) -> int:
    """Read a whole number of at least `least`."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
    return value


def positive(text: str) -> int:
    """Read a whole number above 0."""
    return whole(text, 1)


def natural(text: str) -> int:
    """Read a whole number, 0 or more."""
    return whole(text, 0)


def number(text: str) -> float:
    """Read a number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return value


def above_zero(text: str) -> float:
    """Read a finite number above 0."""
    value = number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0")
    return value


def not_negative(text: str) -> float:
    """Read a finite number, 0 or more."""
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must not be below 0")
    return value


def plain(value: Any) -> Any:
    """Return results with None for numbers that JSON does not have: what is infinite, or not known."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
