"""A compiled grammar in a request's sampling parameters, ready to be matched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mizzen.core.sampling_params import Grammar


@dataclass(frozen=True, slots=True)
class CompiledGrammar(Grammar):
    """A grammar with its compiled form; replaces the plain one in one request."""

    compiled: Any = field(default=None, compare=False, repr=False)
    """`xgrammar.CompiledGrammar`."""
    rid: int = field(default=-1, compare=False)
    """Request that uses it; -1 in the cache."""

    def __reduce__(self) -> tuple[Callable[..., Grammar], tuple[Any, ...]]:
        """Pickle as the plain grammar: the compiled form belongs to this process."""
        return Grammar, (self.kind, self.text)

    def for_request(self, rid: int) -> CompiledGrammar:
        """Return a copy for one request."""
        return CompiledGrammar(self.kind, self.text, self.compiled, rid)
