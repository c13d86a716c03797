# SPDX-License-Identifier: Apache-2.0
"""Rules for known fields that Mizzen does not use: whether a request that sets one is refused or served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

from mizzen.gateway.errors import ApiError, invalid


class Effect(Enum):
    """Consequence of setting a field that is not used."""

    REFUSED = auto()
    """The request is refused, because the client would miss what it asked for."""
    ADVICE = auto()
    """The field is ignored, because it only advises; with `--strict-fields`, the request is refused."""
    UNUSED = auto()
    """The field is always ignored."""


@dataclass(frozen=True, slots=True)
class FieldRule:
    """Rule for one field. Null and the neutral values ask for nothing, and have no effect at all."""

    effect: Effect
    neutral: tuple[Any, ...] = ()
    reason: str = ""
    """Reason why the field is not supported, for the error message."""

    def is_neutral(self, value: object) -> bool:
        """Return whether a value asks for nothing. (In Python 0 equals False, but these values differ.)"""
        return value is None or any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in self.neutral
        )


Rules: TypeAlias = Mapping[str, FieldRule]
"""Rules by the path of their field, such as `text.verbosity`. A path must not lead through a list."""

UNUSED = FieldRule(Effect.UNUSED)
REFUSED = FieldRule(Effect.REFUSED)


def refuse(*neutral: Any, reason: str = "") -> FieldRule:
    """Return the rule for a field that the client would miss."""
    return FieldRule(Effect.REFUSED, neutral, reason)


def unused(*neutral: Any) -> FieldRule:
    """Return the rule for a field that is always ignored."""
    return FieldRule(Effect.UNUSED, neutral)


def advise(*neutral: Any, reason: str = "") -> FieldRule:
    """Return the rule for a field that only advises."""
    return FieldRule(Effect.ADVICE, neutral, reason)


def apply_rules(request: object, rules: Rules, *, strict: bool) -> list[str]:
    """Return the paths of a request's ignored fields.

    Raises:
        ApiError: 400 if the request sets a field that is refused; the error names it.
    """
    ignored: list[str] = []
    for path, rule in rules.items():
        value = find_value(request, path)
        if rule.is_neutral(value):
            continue
        if rule.effect is Effect.REFUSED or (strict and rule.effect is Effect.ADVICE):
            raise unsupported_field(path, rule.reason)
        ignored.append(path)
    return ignored


def find_value(request: object, path: str) -> object:
    """Return the value of the field at a path; None if an object on the path is missing."""
    value: Any = request
    for name in path.split("."):
        if value is None:
            return None
        value = getattr(value, name)
    return value


def unsupported_field(path: str, reason: str = "") -> ApiError:
    """Return the 400 error for a known field that is not supported."""
    text = f"{path} is not supported: {reason}" if reason else f"{path} is not supported (leave it out)"
    return invalid(text, path, "unsupported_parameter")
