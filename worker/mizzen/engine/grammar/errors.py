"""Errors of structured output."""

from __future__ import annotations


class GrammarError(ValueError):
    """A grammar cannot be used; the text says what is wrong and what would be right."""


class CompilerUnavailable(RuntimeError):
    """No grammar can be compiled at the moment."""


class CompileTimeout(RuntimeError):
    """A grammar takes longer than its current time limit, and may be given more."""
