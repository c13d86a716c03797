# SPDX-License-Identifier: Apache-2.0
"""Estimate, from the durations of past steps, the time without output after which an engine counts as hung.

A decode-only step takes about as long as earlier steps of the same size. Steps that contain prefill, steps of
a new size and the first steps after startup may load or compile something, so no limit is given for them. The
serving loop announces the limit to gateways.
"""

from __future__ import annotations

from collections import Counter

SLOWEST_FACTOR = 20.0
"""Ratio of the limit to the duration of the longest past step."""
MIN_STEPS = 16
"""Minimum number of recorded steps before a limit is given."""
MIN_SIZE_STEPS = 2
"""Before a limit is given, each batch size up to the current one must have at least this number of recorded
steps; batch sizes are grouped by powers of two."""
DECAY = 0.999
"""Factor by which the recorded longest duration shrinks with each step."""


class SilenceLimit:
    """Estimator of the time without output after which the engine counts as hung."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Current limit in seconds; 0 if unknown."""
        self._longest = 0.0
        self._steps = 0
        self._sizes: Counter[int] = Counter()

    def record_step(self, seconds: float, rows: int, first_tokens: int, live: int) -> None:
        """Record a completed step and update the limit.

        Args:
            seconds: Time since the previous step, in seconds.
            rows: Number of requests that got tokens in the step.
            first_tokens: Number of requests that got their first token in the step.
            live: Number of requests in the engine, including waiting ones.
        """
        if first_tokens or not rows or rows < live:  # the step contained prefill, or the next one may
            self.seconds = 0.0
            return
        size = rows.bit_length()
        self._steps += 1
        self._sizes[size] += 1
        self._longest = max(seconds, DECAY * self._longest)
        sizes_seen = all(self._sizes[smaller] >= MIN_SIZE_STEPS for smaller in range(1, size + 1))
        self.seconds = SLOWEST_FACTOR * self._longest if sizes_seen and self._steps >= MIN_STEPS else 0.0

    def reset(self) -> None:
        """Drop the limit because the duration of the next step is unknown."""
        self.seconds = 0.0
