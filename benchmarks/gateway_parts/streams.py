"""Plans, requests, raw answers and results of the gateway benchmark's client."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of a client run; times in seconds."""

    port: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    warm_seconds: float = 0.0
    """Time at the start that is not measured."""
    concurrency: int = 0
    """Number of streams at once, each followed by the next; 0 with `rate`."""
    rate: float = 0.0
    """Streams started per second, at random times (Poisson)."""
    once: bool = False
    """Whether to send each of the `concurrency` streams only once."""
    prompts: int = 4000
    seed: int = 1
    timings: bool = False
    """Whether to return the arrival time of each token."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is ready to send, and the location of its expected answer."""

    data: bytes
    key: int
    start: int
    tokens: int


@dataclass(slots=True)
class Stream:
    """The raw answer to a request."""

    request: PreparedRequest
    sent: float
    raw: bytearray = field(default_factory=bytearray)
    marks: list[tuple[float, int]] = field(default_factory=list)
    """Arrival times, each with the number of bytes received by then."""
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
    """Results of a run."""

    began: float
    """Start of the measured span on the monotonic clock."""
    ended: float
    """End of the measured span on the monotonic clock."""
    requests: int = 0
    """Number of requests that ended in the measured span."""
    chunks: int = 0
    """Number of events with text that arrived in the measured span."""
    good: int = 0
    """Number of answers without an incorrect byte."""
    failures: list[str] = field(default_factory=list)
    failed: int = 0
    arrivals: list[Arrivals] = field(default_factory=list)
    max_open: int = 0
    """Maximum number of open streams."""
