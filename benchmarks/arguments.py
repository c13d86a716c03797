"""What benchmarks read from their command line, checked there, and how their results become JSON."""

from __future__ import annotations

import argparse
import math
from typing import Any


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
