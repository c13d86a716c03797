# SPDX-License-Identifier: Apache-2.0
"""Counts requests and tokens by API key. Only the busiest keys have separate series; see `KeyUsage`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, Metric

from mizzen.gateway.telemetry.fast_metrics import OTHER_LABEL

MAX_KEYS = 50
"""Maximum number of keys with separate series; all other keys share the series `other`."""
MAX_CANDIDATES = 1024
"""Maximum number of keys without own series whose recent requests are counted."""
REVIEW_REQUESTS = 1000
"""Number of requests after which keys without series may replace keys with series."""


@dataclass(slots=True)
class _Usage:
    """Usage of one key, or of all keys without separate series."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    recent: float = 0.0
    """Number of requests; it is halved at each review, so that earlier requests count less."""

    def add(self, prompt_tokens: int, output_tokens: int) -> None:
        self.requests += 1
        self.recent += 1
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens


@dataclass(slots=True, eq=False)
class KeyUsage:
    """Counters of at most `MAX_KEYS` keys, and of `other`, which counts the rest.

    The first keys that send requests get series. After every `REVIEW_REQUESTS` requests, a key of the rest
    that has recently sent twice as many requests as the least busy key with series takes the place of that
    key. A key's counters begin at 0 whenever it gets series, and each request is counted once, so that no
    counter falls.
    """

    prefix: str
    _keys: dict[str, _Usage] = field(default_factory=dict)
    _other: _Usage = field(default_factory=_Usage)
    _candidates: dict[str, float] = field(default_factory=dict)
    _requests: int = 0

    def count(self, key: str, prompt_tokens: int, output_tokens: int) -> None:
        """Count a request that has ended; `key` is the name of its API key."""
        usage = self._keys.get(key)
        if usage is None and len(self._keys) < MAX_KEYS and key != OTHER_LABEL:
            usage = self._keys[key] = _Usage()
        if usage is None:
            usage = self._other
            if key in self._candidates or len(self._candidates) < MAX_CANDIDATES:
                self._candidates[key] = self._candidates.get(key, 0.0) + 1
        usage.add(prompt_tokens, output_tokens)
        self._requests += 1
        if self._requests >= REVIEW_REQUESTS:
            self._review()

    def _review(self) -> None:
        """Give series to keys that have become busier than others; let earlier requests count less."""
        self._requests = 0
        self._candidates.pop(OTHER_LABEL, None)
        for candidate, recent in sorted(self._candidates.items(), key=lambda item: -item[1]):
            least = min(self._keys, key=lambda key: self._keys[key].recent)
            if recent <= 2 * self._keys[least].recent:
                break
            del self._keys[least]
            self._keys[candidate] = _Usage(recent=recent)
            del self._candidates[candidate]
        for usage in self._keys.values():
            usage.recent /= 2
        self._candidates = {key: recent / 2 for key, recent in self._candidates.items() if recent >= 1}

    def collect(self) -> Iterator[Metric]:
        """Yield the counters; the registry calls this at every scrape."""
        requests = CounterMetricFamily(
            f"{self.prefix}key_requests", "Requests, by the name of their API key", labels=("key",)
        )
        tokens = CounterMetricFamily(
            f"{self.prefix}key_tokens",
            "Prompt and output tokens of requests, by the name of their API key",
            labels=("key", "type"),
        )
        for name, usage in [*self._keys.items(), (OTHER_LABEL, self._other)]:
            requests.add_metric((name,), usage.requests)
            tokens.add_metric((name, "prompt"), usage.prompt_tokens)
            tokens.add_metric((name, "output"), usage.output_tokens)
        yield from (requests, tokens)
