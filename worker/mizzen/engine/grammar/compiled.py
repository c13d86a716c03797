"""A grammar that is ready to be matched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mizzen.core.sampling_params import Grammar


@dataclass(frozen=True, slots=True)
class CompiledGrammar(Grammar):
    """A grammar with what was compiled from it; takes the place of the plain one in one request."""

    compiled: Any = field(default=None, compare=False, repr=False)
    """`xgrammar.CompiledGrammar`."""
    rid: int = field(default=-1, compare=False)

    def __reduce__(self) -> tuple[Callable[..., Grammar], tuple[Any, ...]]:
        """Travel as the plain grammar: what was compiled belongs to this process."""
        return Grammar, (self.kind, self.text)

    def for_request(self, rid: int) -> CompiledGrammar:
        """Return it as the grammar of one request."""
        return CompiledGrammar(self.kind, self.text, self.compiled, rid)
