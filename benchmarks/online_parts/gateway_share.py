# SPDX-License-Identifier: Apache-2.0
"""Reads how much latency the gateway adds, from the Prometheus metrics of Mizzen's gateway and engines."""

from __future__ import annotations

import math
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families

ADDED = "mizzen_gateway_added_seconds"
GATEWAY_TOKEN = "mizzen_gateway_inter_token_seconds"
ENGINE_TOKEN = "mizzen_engine_inter_token_seconds"
NAMES = (ADDED, GATEWAY_TOKEN, ENGINE_TOKEN)
TIMEOUT = 10.0
READ_ERRORS = (OSError, HTTPException, ValueError)
"""Errors of `fetch_histograms` if a page cannot be read."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations of a histogram, summed over all of its series."""

    counts: Mapping[float, float]
    """Number of observations up to each upper bound in seconds; the last bound is infinite."""
    total: float
    """Sum of all observations in seconds."""

    @property
    def count(self) -> float:
        """Number of observations."""
        return self.counts.get(math.inf, 0.0)

    def minus(self, earlier: Histogram) -> Histogram:
        """Return the observations made since `earlier`."""
        counts = {bound: count - earlier.counts.get(bound, 0.0) for bound, count in self.counts.items()}
        return Histogram(counts, self.total - earlier.total)

    def mean(self) -> float | None:
        """Return the mean in seconds; None without observations."""
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """Return a quantile in seconds, interpolated within its bucket; None without observations.

        A quantile above the highest finite bound is that bound.
        """
        if not self.count:
            return None
        rank, low, below = share * self.count, 0.0, 0.0
        for bound, count in sorted(self.counts.items()):
            if count >= rank:
                if math.isinf(bound):
                    return low
                return low + (bound - low) * (rank - below) / (count - below) if count > below else bound
            low, below = bound, count
        return low


def read_histograms(texts: Iterable[str]) -> dict[str, Histogram]:
    """Return the histograms `NAMES` from metrics in the Prometheus text format; missing ones are empty."""
    counts: dict[str, Counter[float]] = {name: Counter() for name in NAMES}
    totals: Counter[str] = Counter()
    for text in texts:
        for family in text_string_to_metric_families(text):
            if family.name not in counts:
                continue
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    counts[family.name][float(sample.labels["le"])] += sample.value
                elif sample.name.endswith("_sum"):
                    totals[family.name] += sample.value
    return {name: Histogram(counts[name], totals[name]) for name in NAMES}


def fetch_histograms(urls: Iterable[str]) -> dict[str, Histogram]:
    """Return the histograms `NAMES`, summed over the metrics pages `urls`.

    Raises:
        OSError, HTTPException, ValueError: a page cannot be read (`READ_ERRORS`).
    """
    texts = []
    for url in urls:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            texts.append(response.read().decode())
    return read_histograms(texts)


def summarize_share(
    before: Mapping[str, Histogram], after: Mapping[str, Histogram]
) -> dict[str, float | None]:
    """Return the latency that the gateway added between two readings, in milliseconds.

    The time added per token is the difference of the mean times between tokens at the gateway and at the
    engine.
    """
    added, gateway, engine = (after[name].minus(before[name]) for name in NAMES)
    at_gateway, at_engine = gateway.mean(), engine.mean()
    token = None if at_gateway is None or at_engine is None else at_gateway - at_engine
    seconds = {
        "first_token_p50": added.quantile(0.5),
        "first_token_p99": added.quantile(0.99),
        "per_token_mean": token,
        "engine_per_token_mean": at_engine,
    }
    return {name: None if value is None else value * 1e3 for name, value in seconds.items()}


def describe_share(share: Mapping[str, float | None]) -> str:
    """Return a line about the latency that the gateway added."""

    def text(name: str) -> str:
        value = share[name]
        return "-" if value is None else f"{value:.2f}"

    first = f"{text('first_token_p50')}/{text('first_token_p99')} ms (p50/p99) to the first token"
    return f"the gateway added {first}, {text('per_token_mean')} ms (mean) per further token"
