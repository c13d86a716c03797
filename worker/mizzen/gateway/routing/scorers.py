"""Filters, preferences, scorers and pickers that the gateway routes with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b

from mizzen.gateway.routing.interfaces import Candidate, RoutingQuery

SMALL_LOAD_TOKENS = 2048
"""An engine that would have less in work is never overloaded."""
TIE_MARGIN = 0.05
"""Scores that differ by less are equal: loads are known to no better, and several gateways see old ones."""


class ServingFilter:
    """Keeps engines that take requests now."""

    name = "serving"

    def keep(self, request: RoutingQuery, engine: Candidate) -> bool:
        """See `Filter`."""
        return engine.serving and not engine.full and engine not in request.excluded


class CompatibleFilter:
    """Keeps engines whose tokenizer made the prompt, whose context it fits, and that can go on with it."""

    name = "text"

    def keep(self, request: RoutingQuery, engine: Candidate) -> bool:
        """See `Filter`."""
        if request.pinned_model is not None and engine.model_identity != request.pinned_model:
            return False
        return (
            engine.model_identity.tokenizer_hash == request.tokenizer_hash
            and request.context_tokens <= engine.context_length
        )


class HealthyPreference:
    """Prefers engines that are heard."""

    name = "trusted"

    def prefer(self, request: RoutingQuery, engines: Sequence[Candidate]) -> list[bool]:
        """See `Preference`."""
        return [not engine.suspect for engine in engines]


class BoundedLoadPreference:
    """Prefers engines that the request would not lift above `factor` times the mean load.

    After consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2016), so a hot prefix or a
    busy session spreads over engines. Loads below `SMALL_LOAD_TOKENS` are no overload.
    """

    name = "bounded"

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def prefer(self, request: RoutingQuery, engines: Sequence[Candidate]) -> list[bool]:
        """See `Preference`."""
        loads = [engine.load for engine in engines]
        total, least = sum(loads), min(loads)
        count, whole = len(loads), request.prompt_tokens + request.output_tokens
        stays = []
        for engine, load in zip(engines, loads, strict=True):
            cost = whole - request.matched_tokens(engine)
            bound = max(SMALL_LOAD_TOKENS, self._factor * (total + cost) / count)
            stays.append(load + cost <= bound or load == least)
        return stays


class PrefixScorer:
    """The share of the prompt that an engine's cache is thought to hold."""

    name = "prefix"

    def score(self, request: RoutingQuery, engines: Sequence[Candidate]) -> list[float]:
        """See `Scorer`."""
        if not request.block_hashes:
            return [0.0] * len(engines)
        return [request.matched_tokens(engine) / request.prompt_tokens for engine in engines]


class SessionScorer:
    """1 for the engine that a session belongs to, by rendezvous hashing, in every gateway alike."""

    name = "session"

    def score(self, request: RoutingQuery, engines: Sequence[Candidate]) -> list[float]:
        """See `Scorer`."""
        if not request.session:
            return [0.0] * len(engines)
        return rendezvous_scores(request.session.encode(errors="replace"), engines)


class HomeScorer:
    """1 for the engine where a prefix that no engine holds yet belongs, in every gateway alike.

    So gateways that get the first requests of one new prefix at the same moment send them to one engine.
    """

    name = "home"

    def score(self, request: RoutingQuery, engines: Sequence[Candidate]) -> list[float]:
        """See `Scorer`."""
        first = request.block_hashes[:1]
        if not first or any(request.matched_tokens(engine) for engine in engines):
            return [0.0] * len(engines)
        return rendezvous_scores(first[0].to_bytes(8, "little"), engines)


class LoadScorer:
    """1 for an idle engine, a half at the mean load, 0 from twice the mean on."""

    name = "load"

    def score(self, request: RoutingQuery, engines: Sequence[Candidate]) -> list[float]:
        """See `Scorer`."""
        loads = [engine.load for engine in engines]
        scale = 2 * max(sum(loads) / len(loads), SMALL_LOAD_TOKENS / 2)
        return [max(0.0, 1.0 - load / scale) for load in loads]


class TwoChoicesPicker:
    """The best score; among equals the less loaded of two drawn at random.

    Two random choices (Mitzenmacher, 2001) are nearly as even as the least load, and gateways that look at
    the same old loads do not all send to one engine.
    """

    def __init__(self, generator: random.Random | None = None) -> None:
        self._random = generator or random.Random()

    def pick(self, scores: Sequence[float], engines: Sequence[Candidate]) -> int:
        """See `Picker`."""
        best = max(scores)
        equal = [i for i, score in enumerate(scores) if score >= best - TIE_MARGIN]
        if len(equal) == 1:
            return equal[0]
        one, other = self._random.sample(equal, 2)
        return one if engines[one].load <= engines[other].load else other


def rendezvous_scores(key: bytes, engines: Sequence[Candidate]) -> list[float]:
    """Return 1 for the engine that a key belongs to and 0 for the others (Thaler, Ravishankar, 1998).

    When an engine comes or goes, only keys of that engine move.
    """
    weights = [blake2b(b"%b\0%b" % (e.name.encode(), key), digest_size=8).digest() for e in engines]
    scores = [0.0] * len(engines)
    scores[weights.index(max(weights))] = 1.0
    return scores
