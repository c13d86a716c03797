# SPDX-License-Identifier: Apache-2.0
"""Expressions that a program adds to its state: text, generated and selected text, and messages of roles."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mizzen.core.sampling_params import Grammar, GrammarKind, SamplingParams


class SelectMethod(enum.StrEnum):
    """Rule by which `select` chooses."""

    TOKEN_NORMALIZED = "token-normalized"
    """The highest mean log probability of a choice's tokens."""
    UNCONDITIONAL = "unconditional"
    """The highest mean gain in log probability over the choice's tokens without the text before them."""
    GRAMMAR = "grammar"
    """Greedy decoding that allows only the choices. It is the fastest, but the first tokens decide."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Text that the model generates, and the name under which the state keeps it."""

    name: str
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Selection:
    """One of several texts, which the model chooses, and the name under which the state keeps it."""

    name: str
    choices: tuple[str, ...]
    method: SelectMethod


Content = str | Generation | Selection


@dataclass(frozen=True, slots=True)
class RoleMessage:
    """A message of a conversation."""

    role: str
    content: tuple[Content, ...]


@dataclass(frozen=True, slots=True)
class Expression:
    """A sequence of parts; `+` joins expressions and texts."""

    parts: tuple[Content | RoleMessage, ...]

    def __add__(self, other: str | Expression) -> Expression:
        return Expression(self.parts + to_expression(other).parts)

    def __radd__(self, other: str) -> Expression:
        return to_expression(other) + self


def to_expression(value: str | Expression) -> Expression:
    """Return a text as an expression, and an expression unchanged."""
    if isinstance(value, Expression):
        return value
    if isinstance(value, str):
        return Expression((value,))
    raise TypeError(f"a state is extended by text, gen, select or messages, not by {type(value).__name__}")


def gen(
    name: str,
    *,
    max_tokens: int = 256,
    stop: str | Sequence[str] = (),
    regex: str | None = None,
    json_schema: Mapping[str, Any] | None = None,
    **params: Any,
) -> Expression:
    """Generate text, and keep it under a name.

    Args:
        name: Name under which the state returns the text.
        max_tokens: Maximum number of tokens.
        stop: Text, or texts, at which the generation ends; it is not part of the result.
        regex: Regular expression that the text matches.
        json_schema: JSON Schema that the text matches.
        params: Further fields of `SamplingParams`, such as `temperature`.

    Raises:
        TypeError: a parameter is unknown.
        ValueError: a parameter is out of bounds.
    """
    if regex is not None:
        params["grammar"] = Grammar(GrammarKind.REGEX, regex)
    if json_schema is not None:
        params["grammar"] = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(json_schema))
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    return Expression((Generation(name, SamplingParams(max_tokens=max_tokens, stop=texts, **params)),))


def select(
    name: str, choices: Sequence[str], method: SelectMethod | str = SelectMethod.TOKEN_NORMALIZED
) -> Expression:
    """Let the model choose one of several texts, and keep the text under a name.

    Raises:
        ValueError: there are no choices, one of them is empty, or the method is unknown.
    """
    if not choices or not all(choices):
        raise ValueError("choices must hold at least one text, and no empty one")
    return Expression((Selection(name, tuple(dict.fromkeys(choices)), SelectMethod(method)),))


def system(content: str) -> Expression:
    """Return a message of the system."""
    return Expression((RoleMessage("system", (content,)),))


def user(content: str) -> Expression:
    """Return a message of the user."""
    return Expression((RoleMessage("user", (content,)),))


def assistant(content: str | Expression) -> Expression:
    """Return a message of the assistant, which may contain generated and selected text.

    Raises:
        ValueError: the content holds a message.
    """
    parts = to_expression(content).parts
    if any(isinstance(part, RoleMessage) for part in parts):
        raise ValueError("a message cannot contain a message: join them with +")
    return Expression(
        (RoleMessage("assistant", tuple(part for part in parts if not isinstance(part, RoleMessage))),)
    )
