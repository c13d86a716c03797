"""Filters, scorers and pickers that the gateway routes with."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mizzen.core.blocks import BLOCK_TOKENS
from mizzen.gateway.route.plugins import Candidate, RouteRequest

EXPECTED_OUTPUT_TOKENS = 256
"""Counted for an answer of unknown length."""
SMALL_LOAD_TOKENS = 8192
"""An engine with less in work is never overloaded."""


class Serving:
    """Keeps engines that take requests now."""

    def keep(self, request: RouteRequest, engine: Candidate) -> bool:
        """See `Filter`."""
        return engine.serving and not engine.full and engine not in request.excluded


class SameText:
    """Keeps engines whose tokenizer made the prompt, and whose context it fits."""

    def keep(self, request: RouteRequest, engine: Candidate) -> bool:
        """See `Filter`."""
        return (
            engine.tokenizer_hash == request.tokenizer_hash and request.needed_tokens <= engine.context_length
        )


class PrefixScorer:
    """The share of the prompt that an engine's cache is thought to hold; 0 where that would overload it.

    Bounded load, after consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2016): an
    engine above `load_factor` times the mean load has no affinity, so a hot prefix spreads over engines.
    """

    name = "prefix"

    def __init__(self, load_factor: float) -> None:
        self._load_factor = load_factor

    def score(self, request: RouteRequest, engines: Sequence[Candidate]) -> list[float]:
        """See `Scorer`."""
        if not request.blocks:
            return [0.0] * len(engines)
        cost = request.prompt_tokens + EXPECTED_OUTPUT_TOKENS
        loads = [engine.load for engine in engines]
        bound = max(SMALL_LOAD_TOKENS, self._load_factor * (sum(loads) + cost) / len(engines))
        return [
            engine.sketch.match(request.blocks) * BLOCK_TOKENS / request.prompt_tokens
            if load <= bound
            else 0.0
            for engine, load in zip(engines, loads, strict=True)
        ]


class LoadScorer:
    """1 for an idle engine, 0 for the one with most tokens in work."""

    name = "load"

    def score(self, request: RouteRequest, engines: Sequence[Candidate]) -> list[float]:
        """See `Scorer`."""
        loads = [engine.load for engine in engines]
        most = max(loads)
        return [1.0 - load / most if most else 1.0 for load in loads]


class BestPicker:
    """The best score; among equals, a random one."""

    def __init__(self, generator: random.Random | None = None) -> None:
        self._random = generator or random.Random()

    def pick(self, scores: Sequence[float]) -> int:
        """See `Picker`."""
        best = max(scores)
        return self._random.choice([i for i, score in enumerate(scores) if score >= best - 1e-9])
