"""The parts that a router is composed of, each an interface of one method."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mizzen.core.kv.block_hashes import BLOCK_TOKENS
from mizzen.gateway.routing.prefix_index import EnginePrefixes

EXPECTED_OUTPUT_TOKENS = 256
"""Counted for an answer of unknown length, and for longer ones."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What gave an answer's first tokens: only the same can go on with it."""

    model: str
    revision: str
    tokenizer_hash: str


class Candidate(Protocol):
    """An engine as routing sees it."""

    @property
    def name(self) -> str:
        """Its name, the same in every gateway: on Kubernetes the pod's."""
        ...

    @property
    def serving(self) -> bool:
        """Whether it takes requests: connected, its tokenizer loaded, not draining."""
        ...

    @property
    def full(self) -> bool:
        """Whether it has as much work as it should queue, has just refused some, or has failed too often."""
        ...

    @property
    def suspect(self) -> bool:
        """Whether it has been silent for longer than an engine should be."""
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
    def model_identity(self) -> ModelIdentity:
        """What it serves."""
        ...

    @property
    def prefixes(self) -> EnginePrefixes:
        """What its prefix cache holds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingQuery:
    """A request as routing sees it."""

    tokenizer_hash: str
    prompt_tokens: int
    context_tokens: int
    """Of context: the prompt and as much answer as was asked for, 1 at least."""
    output_tokens: int = EXPECTED_OUTPUT_TOKENS
    """What its answer adds to an engine's load."""
    block_hashes: Sequence[int] = ()
    """Names of the prompt's full blocks."""
    session: str = ""
    """What the client says belongs together; empty when it says nothing."""
    pinned_model: ModelIdentity | None = None
    """Of an answer that has begun."""
    excluded: Collection[Candidate] = ()
    """Engines that have refused it or lost it."""
    _matched: dict[int, int] = field(default_factory=dict, compare=False, repr=False)

    def matched_tokens(self, engine: Candidate) -> int:
        """Return how many tokens of the prompt an engine's cache is thought to hold, looked up once."""
        key = id(engine)
        found = self._matched.get(key)
        if found is None:
            found = self._matched[key] = engine.prefixes.match_prefix(self.block_hashes) * BLOCK_TOKENS
        return found


class Filter(Protocol):
    """Says which engines may get a request at all."""

    name: str

    def keep(self, request: RoutingQuery, engine: Candidate) -> bool:
        """Tell whether the engine stays."""
        ...


class Preference(Protocol):
    """Narrows the choice where that leaves one."""

    name: str

    def prefer(self, request: RoutingQuery, engines: Sequence[Candidate]) -> list[bool]:
        """Tell for each engine whether it stays; when none would, all do."""
        ...


class Scorer(Protocol):
    """Says how well engines suit a request."""

    name: str

    def score(self, request: RoutingQuery, engines: Sequence[Candidate]) -> list[float]:
        """Return a number in [0, 1] for each engine, 1 being best."""
        ...


class Picker(Protocol):
    """Chooses among scored engines."""

    def pick(self, scores: Sequence[float], engines: Sequence[Candidate]) -> int:
        """Return the index of the engine chosen; there is at least one."""
        ...
