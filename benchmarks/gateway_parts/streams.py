# SPDX-License-Identifier: Apache-2.0
"""Data types of the gateway benchmark's client: plans, requests, raw answers and results."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of a run of the client; times are in seconds."""

    port: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    warm_seconds: float = 0.0
    """Length of the warm-up at the start of the run, during which nothing is measured."""
    concurrency: int = 0
    """Number of streams at once; each stream that ends is replaced by a new one. 0 if `rate` is set."""
    rate: float = 0.0
    """Number of streams started per second, at random times (Poisson); 0 if `concurrency` is set."""
    once: bool = False
    """Whether `concurrency` streams are started only once, so that no new stream replaces one that ends."""
    prompts: int = 4000
    seed: int = 1
    timings: bool = False
    """Whether the result contains the arrival time of each token."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is ready to send, and the position of its answer in the list of reply tokens."""

    data: bytes
    key: int
    start: int
    """Index of the answer's first token in the list of reply tokens."""
    tokens: int
    """Number of prompt tokens."""


@dataclass(slots=True)
class Stream:
    """Raw answer to a request."""

    request: PreparedRequest
    sent: float
    raw: bytearray = field(default_factory=bytearray)
    marks: list[tuple[float, int]] = field(default_factory=list)
    """Pairs of an arrival time and the number of bytes received by then."""
    error: str = ""
    ended: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrival times of the tokens of a request, in seconds of the monotonic clock."""

    key: int
    sent: float
    tokens: NDArray[np.float64]


@dataclass(slots=True)
class Result:
    """Result of a run of the client."""

    began: float
    """Start of the measured span on the monotonic clock."""
    ended: float
    """End of the measured span on the monotonic clock."""
    requests: int = 0
    """Number of requests that ended in the measured span."""
    chunks: int = 0
    """Number of events with text that arrived in the measured span."""
    good: int = 0
    """Number of correct answers."""
    failures: list[str] = field(default_factory=list)
    failed: int = 0
    arrivals: list[Arrivals] = field(default_factory=list)
    max_open: int = 0
    """Maximum number of streams that were open at once."""
