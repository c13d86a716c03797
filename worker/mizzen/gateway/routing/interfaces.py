"""Interfaces of the parts that compose a router, and the types that they see."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mizzen.core.kv.block_hashes import BLOCK_TOKENS
from mizzen.gateway.routing.prefix_index import EnginePrefixes

EXPECTED_OUTPUT_TOKENS = 256
"""Assumed output tokens of requests without a limit, or with a higher one."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Model that generated an answer's first tokens; only an engine with the same can continue it."""

    model: str
    revision: str
    tokenizer_hash: str


class Candidate(Protocol):
    """Engine as the router sees it."""

    @property
    def name(self) -> str:
        """Name, the same in every gateway; on Kubernetes, the pod's."""
        ...

    @property
    def serving(self) -> bool:
        """True if it takes requests: connected, tokenizer loaded, not draining."""
        ...

    @property
    def full(self) -> bool:
        """True if it has as many requests as it should, backs off, or has an open circuit breaker."""
        ...

    @property
    def suspect(self) -> bool:
        """True if it has been silent for longer than it should be."""
        ...

    @property
    def load(self) -> float:
        """Tokens in flight."""
        ...

    @property
    def context_length(self) -> int:
        """Largest number of tokens of prompt and output together."""
        ...

    @property
    def model_identity(self) -> ModelIdentity:
        """Model that it serves."""
        ...

    @property
    def prefixes(self) -> EnginePrefixes:
        """Content of its prefix cache."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingQuery:
    """Request as the router sees it."""

    tokenizer_hash: str
    prompt_tokens: int
    context_tokens: int
    """Tokens of context needed: the prompt and the requested output, at least 1."""
    output_tokens: int = EXPECTED_OUTPUT_TOKENS
    """Output tokens that it adds to an engine's load."""
    block_hashes: Sequence[int] = ()
    """Hashes of the prompt's full blocks."""
    session: str = ""
    """Session that the client named; empty if none."""
    pinned_model: ModelIdentity | None = None
    """Model of an answer that has begun."""
    excluded: Collection[Candidate] = ()
    """Engines that have refused or lost the request."""
    _matched: dict[int, int] = field(default_factory=dict, compare=False, repr=False)

    def matched_tokens(self, engine: Candidate) -> int:
        """Return how many prompt tokens an engine's cache probably holds; looked up once per engine."""
        key = id(engine)
        matched = self._matched.get(key)
        if matched is None:
            matched = self._matched[key] = engine.prefixes.match_prefix(self.block_hashes) * BLOCK_TOKENS
        return matched


class Filter(Protocol):
    """Excludes engines that must not get a request."""

    name: str

    def keep(self, query: RoutingQuery, engine: Candidate) -> bool:
        """Return whether the engine may get the request."""
        ...


class Preference(Protocol):
    """Narrows the choice if that leaves at least one engine."""

    name: str

    def prefer(self, query: RoutingQuery, engines: Sequence[Candidate]) -> list[bool]:
        """Return for each engine whether it is preferred; if none is, all stay."""
        ...


class Scorer(Protocol):
    """Scores how well engines suit a request."""

    name: str

    def score(self, query: RoutingQuery, engines: Sequence[Candidate]) -> list[float]:
        """Return a score in [0, 1] for each engine; 1 is best."""
        ...


class Picker(Protocol):
    """Chooses among scored engines."""

    def pick(self, scores: Sequence[float], engines: Sequence[Candidate]) -> int:
        """Return the index of the chosen engine; there is at least one."""
        ...
