"""Filters, preferences, scorers and the picker of the gateway's router."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b

from mizzen.gateway.routing.interfaces import Candidate, RoutingQuery

SMALL_LOAD_TOKENS = 2048
"""Load in tokens up to which an engine is never overloaded."""
TIE_MARGIN = 0.05
"""Difference below which scores are equal; loads are not known more exactly, and several gateways see old
ones."""


class ServingFilter:
    """Keeps engines that take requests now."""

    name = "serving"

    def keep(self, query: RoutingQuery, engine: Candidate) -> bool:
        """See `Filter`."""
        return engine.serving and not engine.full and engine not in query.excluded


class CompatibleFilter:
    """Keeps engines with the prompt's tokenizer, enough context, and the model of an answer that has
    begun."""

    name = "text"

    def keep(self, query: RoutingQuery, engine: Candidate) -> bool:
        """See `Filter`."""
        if query.pinned_model is not None and engine.model_identity != query.pinned_model:
            return False
        return (
            engine.model_identity.tokenizer_hash == query.tokenizer_hash
            and query.context_tokens <= engine.context_length
        )


class HealthyPreference:
    """Prefers engines that are not suspect."""

    name = "trusted"

    def prefer(self, query: RoutingQuery, engines: Sequence[Candidate]) -> list[bool]:
        """See `Preference`."""
        return [not engine.suspect for engine in engines]


class BoundedLoadPreference:
    """Prefers engines that the request would not lift above `factor` times the mean load.

    After consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2016): a hot prefix or a
    busy session spreads over engines. Loads up to `SMALL_LOAD_TOKENS` never count as overload.
    """

    name = "bounded"

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def prefer(self, query: RoutingQuery, engines: Sequence[Candidate]) -> list[bool]:
        """See `Preference`."""
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
    """Share of the prompt that an engine's cache probably holds."""

    name = "prefix"

    def score(self, query: RoutingQuery, engines: Sequence[Candidate]) -> list[float]:
        """See `Scorer`."""
        if not query.block_hashes:
            return [0.0] * len(engines)
        return [query.matched_tokens(engine) / query.prompt_tokens for engine in engines]


class SessionScorer:
    """1 for the engine of a session, by rendezvous hashing, the same in every gateway."""

    name = "session"

    def score(self, query: RoutingQuery, engines: Sequence[Candidate]) -> list[float]:
        """See `Scorer`."""
        if not query.session:
            return [0.0] * len(engines)
        return rendezvous_scores(query.session.encode(errors="replace"), engines)


class HomeScorer:
    """1 for the home of a prefix that no engine holds yet, the same in every gateway.

    Gateways that get the first requests of a new prefix at the same moment thus send them to one engine.
    """

    name = "home"

    def score(self, query: RoutingQuery, engines: Sequence[Candidate]) -> list[float]:
        """See `Scorer`."""
        first = query.block_hashes[:1]
        if not first or any(query.matched_tokens(engine) for engine in engines):
            return [0.0] * len(engines)
        return rendezvous_scores(first[0].to_bytes(8, "little"), engines)


class LoadScorer:
    """1 for an idle engine, 0.5 at the mean load, 0 from twice the mean."""

    name = "load"

    def score(self, query: RoutingQuery, engines: Sequence[Candidate]) -> list[float]:
        """See `Scorer`."""
        loads = [engine.load for engine in engines]
        scale = 2 * max(sum(loads) / len(loads), SMALL_LOAD_TOKENS / 2)
        return [max(0.0, 1.0 - load / scale) for load in loads]


class TwoChoicesPicker:
    """Picks the best score; among equals the less loaded of two at random.

    Two random choices (Mitzenmacher, 2001) are nearly as even as the least load, and gateways that see the
    same old loads do not all choose the same engine.
    """

    def __init__(self, generator: random.Random | None = None) -> None:
        self._random = generator or random.Random()

    def pick(self, scores: Sequence[float], engines: Sequence[Candidate]) -> int:
        """See `Picker`."""
        best = max(scores)
        best_candidates = [i for i, score in enumerate(scores) if score >= best - TIE_MARGIN]
        if len(best_candidates) == 1:
            return best_candidates[0]
        first, second = self._random.sample(best_candidates, 2)
        return first if engines[first].load <= engines[second].load else second


def rendezvous_scores(key: bytes, engines: Sequence[Candidate]) -> list[float]:
    """Return 1 for the engine that a key belongs to and 0 for the others (Thaler, Ravishankar, 1998).

    If an engine comes or goes, only keys of that engine move.
    """
    weights = [blake2b(b"%b\0%b" % (e.name.encode(), key), digest_size=8).digest() for e in engines]
    scores = [0.0] * len(engines)
    scores[weights.index(max(weights))] = 1.0
    return scores
