"""Counters and histograms for the path of a token. One event loop adds to them, so they need no locks.

The client library takes a lock for each number and searches buckets linearly, which costs more than
detokenizing. Here adding is one addition; the library reads the sums when it is scraped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

OTHER_LABEL = "other"
"""Label value of everything beyond a metric's known values."""


class FastCounter:
    """Counter without a lock."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount`."""
        self.value += amount


class FastHistogram:
    """Histogram without a lock: observations by upper bound, and their sum."""

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
        """Return the cumulative counts by upper bound."""
        total, cumulative = 0.0, []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self.counts, strict=True):
            total += count
            cumulative.append((bound, total))
        return cumulative


class MetricFamily(Protocol):
    """Interface that the registry needs of a metric with one label."""

    name: str

    def collect(self) -> Iterator[Metric]:
        """Yield the metric with all its values."""
        ...


class FastCounterFamily:
    """Counter with one label."""

    def __init__(
        self, name: str, text: str, label: str, values: Callable[[], Iterable[tuple[str, FastCounter]]]
    ) -> None:
        self.name, self._text, self._label, self._values = name, text, label, values

    def collect(self) -> Iterator[Metric]:
        """See `MetricFamily`."""
        family = CounterMetricFamily(self.name, self._text, labels=(self._label,))
        for value, count in self._values():
            family.add_metric((value,), count.value)
        yield family


class FastHistogramFamily:
    """Histogram with one label."""

    def __init__(
        self, name: str, text: str, label: str, values: Callable[[], Iterable[tuple[str, FastHistogram]]]
    ) -> None:
        self.name, self._text, self._label, self._values = name, text, label, values

    def collect(self) -> Iterator[Metric]:
        """See `MetricFamily`."""
        family = HistogramMetricFamily(self.name, self._text, labels=(self._label,))
        for value, histogram in self._values():
            family.add_metric((value,), histogram.buckets(), histogram.total)
        yield family
