"""Chooses an engine: filters, then the weighted sum of scorers, then a picker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from mizzen.gateway.route.plugins import Candidate, Filter, Picker, RouteRequest, Scorer
from mizzen.gateway.route.scorers import BestPicker, LoadScorer, PrefixScorer, SameText, Serving

E = TypeVar("E", bound=Candidate)

PREFIX_WEIGHT = 2.0
LOAD_WEIGHT = 1.0


@dataclass(frozen=True, slots=True)
class Route(Generic[E]):
    """The engine chosen, and what decided: the scorer that gave most, or "only" without a choice."""

    engine: E
    reason: str


class Router:
    """Stateless: what it looks at is in the engines."""

    def __init__(
        self, filters: Sequence[Filter], scorers: Sequence[tuple[Scorer, float]], picker: Picker
    ) -> None:
        self._filters = filters
        self._scorers = scorers
        self._picker = picker

    def route(self, request: RouteRequest, engines: Iterable[E]) -> Route[E] | None:
        """Return the engine for a request; None when there is none at the moment."""
        kept = [e for e in engines if all(f.keep(request, e) for f in self._filters)]
        if not kept:
            return None
        if len(kept) == 1:
            return Route(kept[0], "only")
        columns = [
            [weight * score for score in scorer.score(request, kept)] for scorer, weight in self._scorers
        ]
        chosen = self._picker.pick([sum(column[i] for column in columns) for i in range(len(kept))])
        gains = [column[chosen] for column in columns]
        reason = self._scorers[gains.index(max(gains))][0].name if max(gains) > 0 else "random"
        return Route(kept[chosen], reason)


def default_router(load_factor_percent: int) -> Router:
    """Return the router of a gateway: prefix affinity within bounded load, else the least load."""
    return Router(
        (Serving(), SameText()),
        ((PrefixScorer(load_factor_percent / 100), PREFIX_WEIGHT), (LoadScorer(), LOAD_WEIGHT)),
        BestPicker(),
    )
