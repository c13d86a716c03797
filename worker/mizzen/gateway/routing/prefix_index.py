"""What engines' prefix caches hold, as names of 64-token blocks: fed by cache events, bounded in memory.

An `EnginePrefixes` mirrors one engine. Two kinds of names are in it: those that the engine said it stored,
until it says that it evicted them; and guesses, blocks of a prompt that was just routed there, until the
engine confirms them or `GUESS_SECONDS` have passed. With both, a second request finds the first one's prefix
at once, and nothing that did not come true is believed for long.

Memory: a name takes `BLOCK_BYTES` at most (measured by a test), and all engines of a gateway share one bound,
`PrefixBudget`. An engine's part is full when it has its share; then an eighth of its names go, those first
that no event and no routed request has touched for longest. What is evicted_blocks costs hits and nothing else:
the engine still has the block, and what is routed there or stored there anew is known again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np

GUESS_SECONDS = 30.0
"""Longer than an engine takes from a request to the event that says that its prompt is in the cache."""
BLOCK_BYTES = 112
"""At most: an entry of a dictionary that has just grown, and its 64-bit key."""
DEFAULT_BLOCKS = 1 << 19
"""33 million tokens of prefixes, in 56 MiB."""
MIN_ENGINE_BLOCKS = 64
"""Of one engine, however many there are."""


class EnginePrefixes:
    """Blocks that one engine holds, or soon will. `capacity` may be changed at any time."""

    __slots__ = ("_capacity", "_clock", "_blocks", "evicted_blocks")

    def __init__(self, capacity: int = DEFAULT_BLOCKS, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._clock = clock
        self._blocks: dict[int, float | None] = {}  # in order of use; None: confirmed, else when a guess ends
        self.evicted_blocks = 0
        """Names that were dropped for want of room."""

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def capacity(self) -> int:
        """Names at most."""
        return self._capacity

    @capacity.setter
    def capacity(self, blocks: int) -> None:
        self._capacity = blocks
        self._evict()

    def match_prefix(self, names: Sequence[int]) -> int:
        """Return how many blocks of a prompt, from its start, are held."""
        held, now = self._blocks, None
        for count, name in enumerate(names):
            until = held.get(name, 0.0)
            if until is None:
                continue
            if now is None:
                now = self._clock()
            if until <= now:
                return count
        return len(names)

    def add_guesses(self, names: Sequence[int]) -> None:
        """Note the blocks of a prompt that is on its way to the engine; those that it has are used anew."""
        held, until = self._blocks, self._clock() + GUESS_SECONDS
        for name in reversed(names):  # the first blocks become the newest: they are worth most
            held[name] = None if held.pop(name, until) is None else until
        self._evict()

    def retract_guesses(self, names: Iterable[int]) -> None:
        """Take guesses back: the engine did not take the request."""
        for name in names:
            if self._blocks.get(name) is not None:
                del self._blocks[name]

    def apply_event(self, stored: Sequence[int], evicted: Iterable[int], reset: bool = False) -> None:
        """Take a cache event; with `reset`, `stored` is all that the engine holds, and no guess stands."""
        if reset:
            self._blocks = {}
        held = self._blocks
        for name in evicted:
            held.pop(name, None)
        for name in reversed(stored[-self._capacity :]):  # the first blocks of a prefix become the newest
            held.pop(name, None)
            held[name] = None
        self._evict()

    def clear(self) -> None:
        """Forget everything: the connection is lost, or the engine is another process."""
        self._blocks = {}

    def _evict(self) -> None:
        held = self._blocks
        if len(held) <= self._capacity:
            return
        # Many at once: each search for the oldest passes over the gaps that those before it have left.
        count = len(held) - self._capacity + self._capacity // 8
        for name in list(islice(held, count)):
            del held[name]
        self.evicted_blocks += count


class PrefixBudget:
    """Shares a bound on names among the engines of a gateway, evenly."""

    def __init__(self, blocks: int = DEFAULT_BLOCKS) -> None:
        self.blocks = blocks

    def divide(self, engines: Sequence[EnginePrefixes]) -> None:
        """Give each engine its part."""
        for one in engines:
            part = max(MIN_ENGINE_BLOCKS, self.blocks // len(engines))
            if one.capacity != part:
                one.capacity = part


def decode_hashes(column: bytes) -> list[int]:
    """Return the names in a column of `mizzen.wire.messages.Blocks` (uint64, little-endian)."""
    return np.frombuffer(column, "<u8").tolist()
