# SPDX-License-Identifier: Apache-2.0
"""Index of the engines' prefix caches: hashes of 64-token blocks, fed by cache events and bounded in memory.

An `EnginePrefixes` mirrors the cache of one engine, with two kinds of blocks. Confirmed blocks are the blocks
that the engine has reported as stored; they stay until it reports their eviction. Guesses are the
blocks of a prompt that was just routed to the engine; they stay until the engine confirms them, or until
`GUESS_SECONDS` have passed. A second request therefore finds the first request's prefix at once, and wrong
guesses do not last.

Memory: a block takes at most `BLOCK_BYTES` (measured by a test), and the engines of a service share one
limit, `PrefixBudget`. If an engine exceeds its share, the least recently used eighth of its blocks is
dropped; events and routed requests count as use. Dropping a block only makes routing less precise,
because the engine still has the block, and the next request or event adds it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np

GUESS_SECONDS = 30.0
"""Lifetime of a guess; the event that confirms the blocks of a request normally arrives sooner."""
BLOCK_BYTES = 112
"""Maximum memory per block, in bytes: an entry in a dictionary that has just grown, and a 64-bit key."""
DEFAULT_BLOCKS = 1 << 19
"""Default limit on the number of blocks: enough for 33 million tokens of prefixes, in 56 MiB of memory."""
MIN_ENGINE_BLOCKS = 64
"""Smallest number of blocks in the share of an engine, however many engines there are."""


class EnginePrefixes:
    """Blocks that one engine holds, or is expected to hold soon. `capacity` may change at any time."""

    __slots__ = ("_blocks", "_capacity", "_clock", "evicted_blocks")

    def __init__(self, capacity: int = DEFAULT_BLOCKS, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._clock = clock
        self._blocks: dict[
            int, float | None
        ] = {}  # least recently used first; None if confirmed, else the time at which the guess ends
        self.evicted_blocks = 0
        """Number of blocks dropped so far because the index was full."""

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def capacity(self) -> int:
        """Maximum number of blocks."""
        return self._capacity

    @capacity.setter
    def capacity(self, blocks: int) -> None:
        self._capacity = blocks
        self._evict()

    def match_prefix(self, hashes: Sequence[int]) -> int:
        """Return how many blocks of a prompt, counted from its start, the engine probably holds."""
        blocks, now = self._blocks, None
        for count, block in enumerate(hashes):
            guess_ends = blocks.get(block, 0.0)
            if guess_ends is None:
                continue
            if now is None:
                now = self._clock()
            if guess_ends <= now:
                return count
        return len(hashes)

    def add_guesses(self, hashes: Sequence[int]) -> None:
        """Add the blocks of a prompt sent to the engine; blocks already in the index count as just used."""
        blocks, guess_ends = self._blocks, self._clock() + GUESS_SECONDS
        for block in reversed(hashes):  # the first blocks become the newest, because they are worth most
            blocks[block] = None if blocks.pop(block, guess_ends) is None else guess_ends
        self._evict()

    def retract_guesses(self, hashes: Iterable[int]) -> None:
        """Remove guesses, because the engine did not take the request."""
        for block in hashes:
            if self._blocks.get(block) is not None:
                del self._blocks[block]

    def apply_event(self, stored: Sequence[int], evicted: Iterable[int], reset: bool = False) -> None:
        """Apply a cache event of the engine; with `reset`, replace all blocks and guesses by `stored`."""
        if reset:
            self._blocks = {}
        blocks = self._blocks
        for block in evicted:
            blocks.pop(block, None)
        for block in reversed(stored[-self._capacity :]):  # the first blocks of a prefix become the newest
            blocks.pop(block, None)
            blocks[block] = None
        self._evict()

    def clear(self) -> None:
        """Remove all blocks, because the connection was lost or the engine's process was replaced."""
        self._blocks = {}

    def _evict(self) -> None:
        blocks = self._blocks
        if len(blocks) <= self._capacity:
            return
        # Drop many at once: each search for the oldest entry must skip the gaps of earlier removals.
        count = len(blocks) - self._capacity + self._capacity // 8
        for block in list(islice(blocks, count)):
            del blocks[block]
        self.evicted_blocks += count


class PrefixBudget:
    """Limit on the number of blocks in the index, divided evenly among the engines of a service."""

    def __init__(self, blocks: int = DEFAULT_BLOCKS) -> None:
        self.blocks = blocks

    def divide(self, engines: Sequence[EnginePrefixes]) -> None:
        """Set the capacity of each engine to its share."""
        for prefixes in engines:
            share = max(MIN_ENGINE_BLOCKS, self.blocks // len(engines))
            if prefixes.capacity != share:
                prefixes.capacity = share


def decode_hashes(column: bytes) -> list[int]:
    """Return the hashes in a field of `mizzen.wire.messages.Blocks` (uint64, little-endian)."""
    return np.frombuffer(column, "<u8").tolist()
