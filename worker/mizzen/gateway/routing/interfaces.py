# SPDX-License-Identifier: Apache-2.0
"""Interfaces of a router's parts (filters, preferences, scorers, picker), and the types that they work on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mizzen.core.kv.block_hashes import BLOCK_TOKENS
from mizzen.gateway.routing.prefix_index import EnginePrefixes

EXPECTED_OUTPUT_TOKENS = 256
"""Assumed number of output tokens of a request, unless its limit is lower."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Identity of a model; only engines with equal identities can continue each other's answers."""

    model: str
    revision: str
    tokenizer_hash: str


class Candidate(Protocol):
    """Engine as the router sees it."""

    @property
    def name(self) -> str:
        """Name of the engine, the same in every gateway; on Kubernetes, the name of its pod."""
        ...

    @property
    def serving(self) -> bool:
        """True if the engine takes requests: connected, tokenizer loaded, verified, warm, not draining."""
        ...

    @property
    def full(self) -> bool:
        """True if the engine has reached its request limit, is backed off, or has an open circuit breaker."""
        ...

    @property
    def suspect(self) -> bool:
        """True if the engine has been silent for too long and has not answered a ping."""
        ...

    @property
    def load(self) -> float:
        """Estimated number of tokens in flight on the engine, from all gateways."""
        ...

    @property
    def context_length(self) -> int:
        """Maximum number of tokens in prompt and output together; 0 if unknown."""
        ...

    @property
    def accepts_images(self) -> bool:
        """True if requests for the engine may have images."""
        ...

    @property
    def model_identity(self) -> ModelIdentity:
        """Identity of the model that the engine serves."""
        ...

    @property
    def prefixes(self) -> EnginePrefixes:
        """Index of the blocks in the engine's prefix cache."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingQuery:
    """Request as the router sees it."""

    tokenizer_hash: str
    prompt_tokens: int
    context_tokens: int
    """Number of tokens that the context must hold: the prompt and the requested output (at least 1 token)."""
    output_tokens: int = EXPECTED_OUTPUT_TOKENS
    """Number of output tokens that the request is expected to add to an engine's load."""
    block_hashes: Sequence[int] = ()
    """Hashes of the prompt's full blocks, in order."""
    session: str = ""
    """Session that the client named; empty if it named none."""
    pinned_model: ModelIdentity | None = None
    """Model that an engine must serve: the one that began the answer; None before the first token."""
    images: bool = False
    """True if the prompt has images."""
    excluded: Collection[Candidate] = ()
    """Engines that have already refused or lost the request."""
    _matched: dict[int, int] = field(default_factory=dict, compare=False, repr=False)

    def matched_tokens(self, engine: Candidate) -> int:
        """Return how many prompt tokens an engine's cache probably holds; computes this once per engine."""
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
    """Prefers some engines. If at least one engine is preferred, all others are excluded."""

    name: str

    def prefer(self, query: RoutingQuery, engines: Sequence[Candidate]) -> list[bool]:
        """Return for each engine, in order, whether it is preferred."""
        ...


class Scorer(Protocol):
    """Scores how well each engine suits a request."""

    name: str

    def score(self, query: RoutingQuery, engines: Sequence[Candidate]) -> list[float]:
        """Return a score in [0, 1] for each engine; 1 is best."""
        ...


class Picker(Protocol):
    """Chooses one of the engines by their total scores."""

    def pick(self, scores: Sequence[float], engines: Sequence[Candidate]) -> int:
        """Return the index of the chosen engine; `engines` is not empty."""
        ...
