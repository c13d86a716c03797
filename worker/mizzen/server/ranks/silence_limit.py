"""For how long an engine can be silent, as far as its own steps tell.

A step that only goes on with answers takes about as long as the last one like it. A step with a prompt, one
of a size that has not been seen, or the first ones after a start may load or compile something: of them
nothing is said. What an engine does not know, it does not promise.
"""

from __future__ import annotations

from collections import Counter

SLOWEST_FACTOR = 20.0
"""A step that takes so many times the longest of its kind hangs."""
MIN_STEPS = 16
"""Before anything is said."""
MIN_SIZE_STEPS = 2
"""Of each size up to the present one; sizes are powers of two."""
DECAY = 0.999
"""What is left of the longest time with every step."""


class SilenceLimit:
    """Watches steps; `seconds` is the time without a step after which the engine hangs."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """0: nothing can be said now."""
        self._longest = 0.0
        self._steps = 0
        self._sizes: Counter[int] = Counter()

    def record_step(self, seconds: float, rows: int, first_tokens: int, live: int) -> None:
        """Note a step.

        Args:
            seconds: since the step before.
            rows: requests that got tokens.
            firsts: how many of them got their first ones.
            live: requests in the engine, waiting ones too.
        """
        if first_tokens or not rows or rows < live:  # it held a prompt, or the next one may
            self.seconds = 0.0
            return
        size = rows.bit_length()
        self._steps += 1
        self._sizes[size] += 1
        self._longest = max(seconds, DECAY * self._longest)
        sizes_seen = all(self._sizes[smaller] >= MIN_SIZE_STEPS for smaller in range(1, size + 1))
        self.seconds = SLOWEST_FACTOR * self._longest if sizes_seen and self._steps >= MIN_STEPS else 0.0

    def reset(self) -> None:
        """Note that what comes next is not known."""
        self.seconds = 0.0
