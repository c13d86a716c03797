"""The parts that a router is composed of, each an interface of one method."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from mizzen.gateway.route.sketch import PrefixSketch


class Candidate(Protocol):
    """An engine as routing sees it."""

    @property
    def name(self) -> str:
        """Its name, for metrics."""
        ...

    @property
    def serving(self) -> bool:
        """Whether it takes requests: connected, its tokenizer loaded, not draining."""
        ...

    @property
    def full(self) -> bool:
        """Whether it has as much work as it should queue, or has just refused some."""
        ...

    @property
    def load(self) -> float:
        """Its tokens in work."""
        ...

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer that it takes at most."""
        ...

    @property
    def tokenizer_hash(self) -> str:
        """The tokenizer that its requests must be made with."""
        ...

    @property
    def sketch(self) -> PrefixSketch:
        """What its prefix cache holds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """A request as routing sees it."""

    tokenizer_hash: str
    prompt_tokens: int
    needed_tokens: int
    """Of context: the prompt and as much answer as was asked for, 1 at least."""
    blocks: Sequence[int] = ()
    """Names of the prompt's full blocks."""
    excluded: Collection[Candidate] = ()
    """Engines that have refused it or lost it."""


class Filter(Protocol):
    """Says which engines may get a request at all."""

    def keep(self, request: RouteRequest, engine: Candidate) -> bool:
        """Tell whether the engine stays."""
        ...


class Scorer(Protocol):
    """Says how well engines suit a request."""

    name: str

    def score(self, request: RouteRequest, engines: Sequence[Candidate]) -> list[float]:
        """Return a number in [0, 1] for each engine, 1 being best."""
        ...


class Picker(Protocol):
    """Chooses among scored engines."""

    def pick(self, scores: Sequence[float]) -> int:
        """Return the index of the engine chosen; there is at least one."""
        ...
