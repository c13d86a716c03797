# SPDX-License-Identifier: Apache-2.0
"""Errors for unknown keyword arguments that name the argument that was probably meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from mizzen.common.foreign_options import FOREIGN_BY_NAME
from mizzen.common.options import flag

P = ParamSpec("P")
R = TypeVar("R")


def suggest_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function with the same signature that explains unknown keyword arguments.

    The new function raises a TypeError that names each unknown argument and suggests a known one. Names of
    vLLM's and SGLang's engine arguments are translated.
    """
    known = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.name != "self"
    ]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            hints = " ".join(f"{name!r}: {_suggest(name, known)}." for name in unknown)
            raise TypeError(f"unknown keyword arguments: {', '.join(unknown)}. {hints}")
        return function(*args, **kwargs)

    return call


def _suggest(name: str, known: Sequence[str]) -> str:
    """Return a sentence, without its full stop, that says what to write instead of an unknown argument."""
    foreign = FOREIGN_BY_NAME.get(flag(name))
    if foreign is not None:
        replacements = [_as_keyword(option) for option in foreign.options]
        if replacements and all(word.partition("=")[0] in known for word in replacements):
            return f"write {' and '.join(replacements)}"
        if not foreign.options:
            return foreign.advice
    words = set(name.split("_"))
    similar = difflib.get_close_matches(name, known, n=1, cutoff=0.75) or [
        candidate for candidate in known if words & set(candidate.split("_"))
    ]
    return f"did you mean {' or '.join(similar)}" if similar else f"the arguments are {', '.join(known)}"


def _as_keyword(option: str) -> str:
    """Return an option with its value as a keyword argument, such as `cuda_graph="off"` or `tensor=N`."""
    name, _, value = option.removeprefix("--").partition(" ")
    shown = value if value.isupper() or value.isdecimal() else f'"{value}"'
    return f"{name.replace('-', '_')}={shown}"
