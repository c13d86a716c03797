# SPDX-License-Identifier: Apache-2.0
"""Sandboxed Jinja environment for chat templates: adds Transformers' extensions, and limits time and size."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARACTERS = 32 * 1024 * 1024
"""Maximum length of a rendered text, and of a value computed while rendering; exceeding it is an error."""


class RenderBounds(threading.local):
    """Deadline of the rendering in the current thread, in seconds of the monotonic clock."""

    deadline = float("inf")

    def check(self) -> None:
        """Raise `jinja2.TemplateRuntimeError` if the deadline has passed."""
        if time.monotonic() > self.deadline:
            raise jinja2.TemplateRuntimeError("the chat template took too long")


class GenerationTag(Extension):
    """Jinja tag `{% generation %} … {% endgeneration %}`, a training marker: renders only its content."""

    tags = {"generation"}  # noqa: RUF012  (as in Jinja's base class)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateDict:
    """`dict` for templates: creates dictionaries without exposing Python's class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Return a dictionary, like `dict`."""
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return a dictionary with the given keys, like `dict.fromkeys`."""
        return dict.fromkeys(*args)


class TemplateNamespace(Namespace):
    """`namespace` for templates: rejects attribute names with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # no named parameters, so that `namespace(self=…)` works as in Jinja
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            refuse_underscore(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        refuse_underscore(name)
        super().__setitem__(name, value)


def refuse_underscore(name: object) -> None:
    """Reject an attribute name with a leading underscore, which could give access to Python's internals."""
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"the namespace attribute {name!r} begins with an underscore")


def raise_exception(message: object) -> NoReturn:
    """Raise an error with a message; templates call this to reject a conversation."""
    raise jinja2.TemplateError(str(message))


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON text, without the HTML escapes of Jinja's own `tojson`."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def strftime_now(form: str) -> str:
    """Return the current local time in a `strftime` format."""
    return datetime.now().strftime(form)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox; loops and calls also check a deadline, and operators check a size limit."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        self.bounds = RenderBounds()
        self.filters["tojson"] = tojson
        self.filters["_bounded"] = self._bounded
        self.globals.update(
            raise_exception=raise_exception,
            strftime_now=strftime_now,
            dict=TemplateDict(),
            namespace=TemplateNamespace,
        )

    def _bounded(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.bounds.check()
            yield item

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_bounded", [], [], None, None, lineno=loop.lineno)
        return super()._generate(source, name, filename, defer_init)

    def call(*args: Any, **kwargs: Any) -> Any:
        """Call a function from a template, unless the deadline has passed.

        There are no named parameters, so that a template can pass any keyword, as in Jinja.
        """
        args[0].bounds.check()
        return ImmutableSandboxedEnvironment.call(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply `+`, `*` or `**` unless the result would be too large."""
        if operator == "**":
            too_large = isinstance(left, int) and isinstance(right, int) and right * left.bit_length() > 4096
        elif operator == "*":
            too_large = repeated_length(left, right) > MAX_CHARACTERS
        else:
            too_large = sequence_length(left) + sequence_length(right) > MAX_CHARACTERS
        if too_large:
            raise jinja2.TemplateRuntimeError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def sequence_length(value: Any) -> int:
    """Return the length of a string, list or tuple; 0 for any other value."""
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def repeated_length(left: Any, right: Any) -> int:
    """Return the length of `left * right` if one operand is a sequence and the other an integer, else 0."""
    if isinstance(left, int):
        left, right = right, left
    return sequence_length(left) * right if isinstance(right, int) else 0
