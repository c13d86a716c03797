# SPDX-License-Identifier: Apache-2.0
"""Times of a traced request in the engine, from which its spans are created after it has finished.

Only requests of sampled traces have a `RequestTimeline`. The scheduler updates it when it launches a prefill
chunk, when the chunk's step is complete, and when it retracts the request, so a decode step costs nothing.
"""

from __future__ import annotations

import re

from msgspec import Struct, field

MAX_CHUNKS = 64
"""Maximum number of prefill chunks in a timeline; further ones are only counted."""
MAX_PREEMPTIONS = 32
"""Maximum number of preemptions in a timeline; further ones are only counted."""
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f][13579bdf]")
"""W3C trace context of a sampled span."""


class ChunkLaunch(Struct, frozen=True, array_like=True):
    """Launch of a prefill chunk with `tokens` tokens; the first one has the position `start`."""

    time: float
    start: int
    tokens: int


class PreemptionTimes(Struct, array_like=True):
    """Times of one preemption. Times are 0 while the event has not happened."""

    began: float
    reason: str
    """`priority`, or `memory` if KV pages were short."""
    computed: int
    """Number of tokens whose KV had been computed or was being computed."""
    resumed: float = 0.0
    """Time at which the first chunk after the preemption was launched."""
    cached: int = 0
    """Number of tokens whose KV came from the prefix cache when the request resumed."""
    chunks: int = 0
    """Number of prefill chunks after the request resumed."""
    ended: float = 0.0
    """Time at which the request got its next token."""


class RequestTimeline(Struct, array_like=True):
    """Times of one request, in seconds of the scheduler's clock; 0 while the event has not happened."""

    traceparent: str
    """W3C trace context of the gateway's span for the request."""
    arrival: float
    grammar_ready: float = 0.0
    """Time at which the request's grammar was compiled; 0 if the request did not wait for a grammar."""
    scheduled: float = 0.0
    """Time at which the first prefill chunk was launched."""
    cached: int = 0
    """Number of tokens whose KV came from the prefix cache when the first chunk was launched."""
    chunk_count: int = 0
    """Number of prefill chunks before the first token, except those after a preemption."""
    chunk_tokens: int = 0
    """Number of tokens in these chunks."""
    chunks: list[ChunkLaunch] = field(default_factory=list)
    """The first `MAX_CHUNKS` of these chunks."""
    first_token: float = 0.0
    first_step: int = 0
    """Number of the step that sampled the first token."""
    preemption_count: int = 0
    preemptions: list[PreemptionTimes] = field(default_factory=list)
    """The first `MAX_PREEMPTIONS` preemptions."""

    def launch_chunk(self, now: float, start: int, tokens: int) -> None:
        """Record the launch of a prefill chunk: its first position and its number of tokens."""
        if self.preemption_count:
            if self.preemption_count > MAX_PREEMPTIONS:
                return
            preemption = self.preemptions[-1]
            if not preemption.resumed:
                preemption.resumed, preemption.cached = now, start
            preemption.chunks += 1
            return
        if not self.scheduled:
            self.scheduled, self.cached = now, start
        self.chunk_count += 1
        self.chunk_tokens += tokens
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(ChunkLaunch(now, start, tokens))

    def receive_token(self, now: float, step: int, preemptions: int) -> None:
        """Record the completion of a step that sampled the first token since the request (re)started.

        Args:
            now: time of the completion.
            step: number of the step.
            preemptions: `preemption_count` when the step was launched. If the request has been preempted
                since, the token was discarded.
        """
        if preemptions != self.preemption_count:
            return
        if not self.first_token:
            self.first_token, self.first_step = now, step
        if 0 < preemptions <= MAX_PREEMPTIONS:
            self.preemptions[-1].ended = now

    def preempt(self, now: float, reason: str, computed: int) -> None:
        """Record that the request was retracted, with the KV of `computed` tokens."""
        self.preemption_count += 1
        if len(self.preemptions) < MAX_PREEMPTIONS:
            self.preemptions.append(PreemptionTimes(now, reason, computed))


def start_timeline(traceparent: str, arrival: float) -> RequestTimeline | None:
    """Return the timeline of a request that arrived now; None if its trace context is invalid or not sampled.

    Args:
        traceparent: W3C trace context of the gateway's span; empty if the request is not traced.
        arrival: time of arrival.
    """
    return RequestTimeline(traceparent, arrival) if _TRACEPARENT.fullmatch(traceparent) else None
