"""Chooses an engine: filters, preferences, the weighted sum of scorers, then a picker."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mizzen.gateway.routing.interfaces import Candidate, Filter, Picker, Preference, RoutingQuery, Scorer
from mizzen.gateway.routing.scorers import (
    BoundedLoadPreference,
    CompatibleFilter,
    HealthyPreference,
    HomeScorer,
    LoadScorer,
    PrefixScorer,
    ServingFilter,
    SessionScorer,
    TwoChoicesPicker,
)

E = TypeVar("E", bound=Candidate)

PREFIX_WEIGHT = 2.0
SESSION_WEIGHT = 1.0
LOAD_WEIGHT = 1.0
HOME_WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class Route(Generic[E]):
    """The engine chosen, and why."""

    engine: E
    reason: str
    """The scorer by which it stands out most; "only" without a choice, "random" among equals."""
    matched_tokens: int
    """Of the prompt, that its cache is thought to hold."""


@dataclass(slots=True, eq=False)
class Verdict(Generic[E]):
    """What a router thinks of one engine, for people who ask."""

    engine: E
    matched_tokens: int
    excluded_by: str = ""
    """The filter or preference; empty for a candidate."""
    scores: dict[str, float] = field(default_factory=dict)
    """By scorer, weighted."""

    @property
    def total(self) -> float:
        """The sum of the scores."""
        return sum(self.scores.values())


class Router:
    """Stateless: what it looks at is in the engines."""

    def __init__(
        self,
        filters: Sequence[Filter],
        preferences: Sequence[Preference],
        scorers: Sequence[tuple[Scorer, float]],
        picker: Picker,
    ) -> None:
        self._filters = filters
        self._preferences = preferences
        self._scorers = scorers
        self._picker = picker

    def route(self, request: RoutingQuery, engines: Iterable[E]) -> Route[E] | None:
        """Return the engine for a request; None when there is none at the moment."""
        kept = [e for e in engines if all(f.keep(request, e) for f in self._filters)]
        if not kept:
            return None
        for preference in self._preferences:
            kept = _keep_preferred(kept, preference.prefer(request, kept))
        chosen, reason = 0, "only"
        if len(kept) > 1:
            columns = self._weighted_scores(request, kept)
            sums = [sum(scores) for scores in zip(*columns, strict=True)] or [0.0] * len(kept)
            chosen = self._picker.pick(sums, kept)
            gains = [column[chosen] - sum(column) / len(kept) for column in columns]
            best = max(gains, default=0.0)
            reason = self._scorers[gains.index(best)][0].name if best > 1e-9 else "random"
        return Route(kept[chosen], reason, request.matched_tokens(kept[chosen]))

    def explain(self, request: RoutingQuery, engines: Iterable[E]) -> list[Verdict[E]]:
        """Return what `route` looks at, for each engine."""
        verdicts = [Verdict(e, request.matched_tokens(e)) for e in engines]
        for one in verdicts:
            one.excluded_by = next((f.name for f in self._filters if not f.keep(request, one.engine)), "")
        left = [one for one in verdicts if not one.excluded_by]
        for preference in self._preferences if left else ():
            stays = preference.prefer(request, [one.engine for one in left])
            after = _keep_preferred(left, stays)
            for one in left:
                one.excluded_by = "" if one in after else preference.name
            left = after
        if left:
            columns = self._weighted_scores(request, [one.engine for one in left])
            for (scorer, _), column in zip(self._scorers, columns, strict=True):
                for one, score in zip(left, column, strict=True):
                    one.scores[scorer.name] = score
        return verdicts

    def _weighted_scores(self, request: RoutingQuery, engines: Sequence[Candidate]) -> list[list[float]]:
        return [
            [weight * score for score in scorer.score(request, engines)] for scorer, weight in self._scorers
        ]


T = TypeVar("T")


def _keep_preferred(candidates: list[T], stays: Sequence[bool]) -> list[T]:
    """Return those that stay; all when none would."""
    return [one for one, stay in zip(candidates, stays, strict=True) if stay] or candidates


def default_router(load_factor_percent: int, generator: random.Random | None = None) -> Router:
    """Return the router of a gateway: cached prefixes, sessions and load, all within bounded load."""
    return Router(
        (ServingFilter(), CompatibleFilter()),
        (HealthyPreference(), BoundedLoadPreference(load_factor_percent / 100)),
        (
            (PrefixScorer(), PREFIX_WEIGHT),
            (SessionScorer(), SESSION_WEIGHT),
            (LoadScorer(), LOAD_WEIGHT),
            (HomeScorer(), HOME_WEIGHT),
        ),
        TwoChoicesPicker(generator),
    )
