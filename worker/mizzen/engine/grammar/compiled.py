# SPDX-License-Identifier: Apache-2.0
"""A compiled grammar, which replaces the plain one in a request's sampling parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mizzen.core.sampling_params import Grammar


@dataclass(frozen=True, slots=True)
class CompiledGrammar(Grammar):
    """A grammar with its compiled form."""

    compiled: Any = field(default=None, compare=False, repr=False)
    """`xgrammar.CompiledGrammar`."""
    rid: int = field(default=-1, compare=False)
    """Id of the request that uses this copy; -1 for the copy in the cache."""

    def __reduce__(self) -> tuple[Callable[..., Grammar], tuple[Any, ...]]:
        """Pickle as a plain grammar, because the compiled form is only valid in this process."""
        return Grammar, (self.kind, self.text)

    def for_request(self, rid: int) -> CompiledGrammar:
        """Return a copy of this grammar for a request; the copy shares its compiled form."""
        return CompiledGrammar(self.kind, self.text, self.compiled, rid)
