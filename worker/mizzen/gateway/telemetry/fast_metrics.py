"""Counters and histograms for the path of a token: one event loop adds to them, so they need no locks.

The client library's own take a lock for each number and look for a bucket one by one, which costs more than
detokenizing. Here adding is an addition; the library asks for the sums when it is scraped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

OTHER_LABEL = "other"
"""Label of everything beyond a metric's known values."""


class FastCounter:
    """A number that grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add."""
        self.value += amount


class FastHistogram:
    """A histogram: how many observations fell under which bound, and their sum."""

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
        total, found = 0.0, []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self.counts, strict=True):
            total += count
            found.append((bound, total))
        return found


class MetricFamily(Protocol):
    """What the registry asks a metric with one label for."""

    name: str

    def collect(self) -> Iterator[Metric]:
        """Yield it with all its values."""
        ...


class FastCounterFamily:
    """A counter by one label."""

    def __init__(
        self, name: str, text: str, label: str, values: Callable[[], Iterable[tuple[str, FastCounter]]]
    ) -> None:
        self.name, self._text, self._label, self._values = name, text, label, values

    def collect(self) -> Iterator[Metric]:
        """See `Family`."""
        family = CounterMetricFamily(self.name, self._text, labels=(self._label,))
        for value, count in self._values():
            family.add_metric((value,), count.value)
        yield family


class FastHistogramFamily:
    """A histogram by one label."""

    def __init__(
        self, name: str, text: str, label: str, values: Callable[[], Iterable[tuple[str, FastHistogram]]]
    ) -> None:
        self.name, self._text, self._label, self._values = name, text, label, values

    def collect(self) -> Iterator[Metric]:
        """See `Family`."""
        family = HistogramMetricFamily(self.name, self._text, labels=(self._label,))
        for value, spread in self._values():
            family.add_metric((value,), spread.buckets(), spread.total)
        yield family
