"""What a grammar is refused with."""

from __future__ import annotations


class GrammarError(ValueError):
    """A grammar cannot be used; the text says what is wrong and what would be right."""


class CompilerDown(RuntimeError):
    """Grammars cannot be compiled at the moment, whatever they are."""


class TooSlow(RuntimeError):
    """A grammar takes longer than it was given, and may be given more."""
