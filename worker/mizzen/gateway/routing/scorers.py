# SPDX-License-Identifier: Apache-2.0
"""Filters, preferences, scorers and the picker of the gateway's router."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b

from mizzen.gateway.routing.interfaces import Candidate, RoutingQuery

SMALL_LOAD_TOKENS = 2048
"""Load in tokens up to which an engine never counts as overloaded."""
TIE_MARGIN = 0.05
"""Difference up to which scores count as equal, because loads are known only roughly and with some delay."""


class ServingFilter:
    """Keeps engines that can take the request now."""

    name = "serving"

    def keep(self, query: RoutingQuery, engine: Candidate) -> bool:
        """Return whether the engine serves, is not full, and has not refused or lost the request before."""
        return engine.serving and not engine.full and engine not in query.excluded


class CompatibleFilter:
    """Keeps engines with the prompt's tokenizer and enough context.

    If the answer has begun, the engine must also serve the model that began it.
    """

    name = "text"

    def keep(self, query: RoutingQuery, engine: Candidate) -> bool:
        """Return whether the engine can process the prompt and, if the answer has begun, continue it."""
        if query.pinned_model is not None and engine.model_identity != query.pinned_model:
            return False
        return (
            engine.model_identity.tokenizer_hash == query.tokenizer_hash
            and query.context_tokens <= engine.context_length
        )


class ImagesFilter:
    """Keeps engines that accept images, if the prompt has any.

    Engines with the same tokenizer may differ in this during a rollout.
    """

    name = "images"

    def keep(self, query: RoutingQuery, engine: Candidate) -> bool:
        """Return whether the prompt has no images, or the engine accepts them."""
        return not query.images or engine.accepts_images


class HealthyPreference:
    """Prefers engines that are not suspect."""

    name = "trusted"

    def prefer(self, query: RoutingQuery, engines: Sequence[Candidate]) -> list[bool]:
        """Return for each engine, in order, whether it is not suspect."""
        return [not engine.suspect for engine in engines]


class BoundedLoadPreference:
    """Prefers engines whose load the request would not raise above `factor` times the mean load.

    A hot prefix or a busy session thus spreads over several engines, as in consistent hashing with bounded
    loads (Mirrokni, Thorup, Zadimoghaddam, 2016). Loads up to `SMALL_LOAD_TOKENS` never count as overload.
    """

    name = "bounded"

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def prefer(self, query: RoutingQuery, engines: Sequence[Candidate]) -> list[bool]:
        """Return for each engine whether its load stays within the bound, or is the lowest load of all."""
        loads = [engine.load for engine in engines]
        total, least_load = sum(loads), min(loads)
        count, request_tokens = len(loads), query.prompt_tokens + query.output_tokens
        keeps = []
        for engine, load in zip(engines, loads, strict=True):
            cost = request_tokens - query.matched_tokens(engine)
            bound = max(SMALL_LOAD_TOKENS, self._factor * (total + cost) / count)
            keeps.append(load + cost <= bound or load == least_load)
        return keeps


class PrefixScorer:
    """Scores the fraction of the prompt that an engine's cache probably holds."""

    name = "prefix"

    def score(self, query: RoutingQuery, engines: Sequence[Candidate]) -> list[float]:
        """Return for each engine the fraction of the prompt's tokens that its cache probably holds."""
        if not query.block_hashes:
            return [0.0] * len(engines)
        return [query.matched_tokens(engine) / query.prompt_tokens for engine in engines]


class SessionScorer:
    """Scores 1 for the engine to which rendezvous hashing assigns the request's session, and 0 for others.

    Every gateway assigns a session to the same engine.
    """

    name = "session"

    def score(self, query: RoutingQuery, engines: Sequence[Candidate]) -> list[float]:
        """Return 1 for the session's engine and 0 for all others; 0 for all if the request has no session."""
        if not query.session:
            return [0.0] * len(engines)
        return rendezvous_scores(query.session.encode(errors="replace"), engines)


class HomeScorer:
    """Scores 1 for the engine that rendezvous hashing selects for a prefix that no engine holds yet.

    This engine is the prefix's home. If several gateways get requests with the same new prefix at the same
    moment, they thus send them to the same engine.
    """

    name = "home"

    def score(self, query: RoutingQuery, engines: Sequence[Candidate]) -> list[float]:
        """Return 1 for the home of the prompt's first block and 0 for all others.

        All scores are 0 if an engine holds the block already, or if the prompt has no full block.
        """
        first = query.block_hashes[:1]
        if not first or any(query.matched_tokens(engine) for engine in engines):
            return [0.0] * len(engines)
        return rendezvous_scores(first[0].to_bytes(8, "little"), engines)


class LoadScorer:
    """Scores 1 for an idle engine, 0.5 at the mean load, and 0 at twice the mean load or more."""

    name = "load"

    def score(self, query: RoutingQuery, engines: Sequence[Candidate]) -> list[float]:
        """Return a score in [0, 1] for each engine; the lower the engine's load, the higher its score."""
        loads = [engine.load for engine in engines]
        scale = 2 * max(sum(loads) / len(loads), SMALL_LOAD_TOKENS / 2)
        return [max(0.0, 1.0 - load / scale) for load in loads]


class TwoChoicesPicker:
    """Picks the engine with the best score; among equal ones, the less loaded of two chosen at random.

    Two random choices (Mitzenmacher, 2001) distribute load nearly as evenly as the choice of the least loaded
    engine. Gateways that see the same outdated loads do not all choose the same engine.
    """

    def __init__(self, generator: random.Random | None = None) -> None:
        self._random = generator or random.Random()

    def pick(self, scores: Sequence[float], engines: Sequence[Candidate]) -> int:
        """Return the index of the chosen engine; `engines` is not empty."""
        best = max(scores)
        best_candidates = [i for i, score in enumerate(scores) if score >= best - TIE_MARGIN]
        if len(best_candidates) == 1:
            return best_candidates[0]
        first, second = self._random.sample(best_candidates, 2)
        return first if engines[first].load <= engines[second].load else second


def rendezvous_scores(key: bytes, engines: Sequence[Candidate]) -> list[float]:
    """Assign a key to an engine by rendezvous hashing; return 1 for that engine and 0 for all others.

    If an engine is added or removed, only that engine's keys move (Thaler, Ravishankar, 1998).
    """
    weights = [blake2b(b"%b\0%b" % (e.name.encode(), key), digest_size=8).digest() for e in engines]
    scores = [0.0] * len(engines)
    scores[weights.index(max(weights))] = 1.0
    return scores
