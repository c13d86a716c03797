# SPDX-License-Identifier: Apache-2.0
"""Router: chooses an engine by filters, preferences, a weighted sum of scores, and a picker.

A router is stateless; all state is in the engines. The dispatcher calls `route`; the admin API calls
`explain`.
"""

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
    ImagesFilter,
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
    """Result of routing: the chosen engine, and the reason for the choice."""

    engine: E
    reason: str
    """Name of the scorer whose weighted score for this engine is farthest above its mean over all engines.

    It is "only" if there was no other engine, and "random" if no scorer's score exceeds its mean.
    """
    matched_tokens: int
    """Number of prompt tokens that the engine's cache probably holds."""


@dataclass(slots=True, eq=False)
class Verdict(Generic[E]):
    """A router's verdict on one engine for one request, for the debug endpoint."""

    engine: E
    matched_tokens: int
    excluded_by: str = ""
    """Name of the filter or preference that excluded the engine; empty if it was not excluded."""
    scores: dict[str, float] = field(default_factory=dict)
    """Weighted scores by scorer name; empty if the engine was excluded."""

    @property
    def total(self) -> float:
        """Sum of the weighted scores."""
        return sum(self.scores.values())


class Router:
    """Stateless combination of filters, preferences, scorers with their weights, and a picker."""

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

    def route(self, query: RoutingQuery, engines: Iterable[E]) -> Route[E] | None:
        """Return the route of a request; None if no engine can take the request now."""
        kept = [e for e in engines if all(f.keep(query, e) for f in self._filters)]
        if not kept:
            return None
        for preference in self._preferences:
            kept = _keep_preferred(kept, preference.prefer(query, kept))
        index, reason = 0, "only"
        if len(kept) > 1:
            columns = self._weighted_scores(query, kept)
            sums = [sum(scores) for scores in zip(*columns, strict=True)] or [0.0] * len(kept)
            index = self._picker.pick(sums, kept)
            gains = [column[index] - sum(column) / len(kept) for column in columns]
            best = max(gains, default=0.0)
            reason = self._scorers[gains.index(best)][0].name if best > 1e-9 else "random"
        return Route(kept[index], reason, query.matched_tokens(kept[index]))

    def explain(self, query: RoutingQuery, engines: Iterable[E]) -> list[Verdict[E]]:
        """Return the verdict on each engine: what would exclude the engine in `route`, or its scores."""
        verdicts = [Verdict(e, query.matched_tokens(e)) for e in engines]
        for verdict in verdicts:
            verdict.excluded_by = next(
                (f.name for f in self._filters if not f.keep(query, verdict.engine)), ""
            )
        remaining = [verdict for verdict in verdicts if not verdict.excluded_by]
        for preference in self._preferences if remaining else ():
            keep = preference.prefer(query, [verdict.engine for verdict in remaining])
            kept_verdicts = _keep_preferred(remaining, keep)
            for verdict in remaining:
                verdict.excluded_by = "" if verdict in kept_verdicts else preference.name
            remaining = kept_verdicts
        if remaining:
            columns = self._weighted_scores(query, [verdict.engine for verdict in remaining])
            for (scorer, _), column in zip(self._scorers, columns, strict=True):
                for verdict, score in zip(remaining, column, strict=True):
                    verdict.scores[scorer.name] = score
        return verdicts

    def _weighted_scores(self, query: RoutingQuery, engines: Sequence[Candidate]) -> list[list[float]]:
        return [
            [weight * score for score in scorer.score(query, engines)] for scorer, weight in self._scorers
        ]


T = TypeVar("T")


def _keep_preferred(candidates: list[T], keep: Sequence[bool]) -> list[T]:
    """Return the preferred candidates, or all candidates if none is preferred."""
    return [candidate for candidate, kept in zip(candidates, keep, strict=True) if kept] or candidates


def default_router(load_factor_percent: int, generator: random.Random | None = None) -> Router:
    """Return the gateway's router, which scores cached prefixes, sessions and load, and bounds the load.

    `load_factor_percent` is the load, in percent of the mean, above which an engine is avoided.
    """
    return Router(
        (ServingFilter(), CompatibleFilter(), ImagesFilter()),
        (HealthyPreference(), BoundedLoadPreference(load_factor_percent / 100)),
        (
            (PrefixScorer(), PREFIX_WEIGHT),
            (SessionScorer(), SESSION_WEIGHT),
            (LoadScorer(), LOAD_WEIGHT),
            (HomeScorer(), HOME_WEIGHT),
        ),
        TwoChoicesPicker(generator),
    )


def route_header(route: Route[E]) -> str:
    """Return a route as the value of the header `x-mizzen-route`."""
    name = "".join(letter if "!" <= letter <= "~" and letter != ";" else "_" for letter in route.engine.name)
    return f"engine={name}; reason={route.reason}; matched={route.matched_tokens}"
