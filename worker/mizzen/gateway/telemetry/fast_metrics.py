# SPDX-License-Identifier: Apache-2.0
"""Counters and histograms that are updated for each token. Only the event loop updates them, without locks.

The Prometheus client library takes a lock for each update and searches buckets linearly, which costs more
than detokenizing a token. Here, an update of a counter is one addition; the library reads the values at a
scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

OTHER_LABEL = "other"
"""Label value that replaces all values that are not known in advance, such as names of unknown models."""


class FastCounter:
    """Counter without a lock."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount`."""
        self.value += amount


class FastHistogram:
    """Histogram without a lock: `counts` has one count per bucket; `total` is the sum of all observations."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Add an observation."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return the upper bound and the cumulative count of each bucket."""
        total, cumulative = 0.0, []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self.counts, strict=True):
            total += count
            cumulative.append((bound, total))
        return cumulative


class MetricFamily(Protocol):
    """Interface of a metric with one label; the Prometheus client library calls it at a scrape."""

    name: str

    def collect(self) -> Iterator[Metric]:
        """Yield the metric with all its values."""
        ...


class FastCounterFamily:
    """Counter with one label; `values` returns the counter of each label value at a scrape."""

    def __init__(
        self, name: str, text: str, label: str, values: Callable[[], Iterable[tuple[str, FastCounter]]]
    ) -> None:
        self.name, self._text, self._label, self._values = name, text, label, values

    def collect(self) -> Iterator[Metric]:
        """Yield the counter with its values for all label values."""
        family = CounterMetricFamily(self.name, self._text, labels=(self._label,))
        for value, count in self._values():
            family.add_metric((value,), count.value)
        yield family


class FastHistogramFamily:
    """Histogram with one label; `values` returns the histogram of each label value at a scrape."""

    def __init__(
        self, name: str, text: str, label: str, values: Callable[[], Iterable[tuple[str, FastHistogram]]]
    ) -> None:
        self.name, self._text, self._label, self._values = name, text, label, values

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram with its buckets for all label values."""
        family = HistogramMetricFamily(self.name, self._text, labels=(self._label,))
        for value, histogram in self._values():
            family.add_metric((value,), histogram.buckets(), histogram.total)
        yield family
