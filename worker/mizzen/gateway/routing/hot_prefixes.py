"""The hottest prefixes of prompts, with their tokens: what a new engine's cache is filled with at first.

A tree of 64-token blocks, by the names of `mizzen.core.kv.block_hashes`. Each prompt adds to the weight of its blocks;
a weight halves in `HALF_LIFE_SECONDS`. A block weighs no more than the one before it, for whatever counts for
the one counts for the other, so the heaviest blocks are always whole prefixes.

Privacy: token ids of prompts stay in the memory of this process, `capacity` blocks (256 bytes of ids each) at
most, until lighter than others. A prefix is replayed under its own salt: tenants share nothing by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nsmallest

import numpy as np

from mizzen.core.kv.block_hashes import BLOCK_TOKENS
from mizzen.core.request import Int32

HALF_LIFE_SECONDS = 600.0
MAX_PROMPT_BLOCKS = 256
"""Of one prompt: what lies behind is a conversation's own."""
REBASE_WEIGHT = 2.0**64
"""Weights grow with time instead of shrinking; beyond this all are divided."""


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix that many prompts begin with."""

    tokens: Int32
    """int32 [n], whole blocks."""
    salt: bytes
    block_hashes: tuple[int, ...]
    """Of its blocks."""


class _PrefixBlock:
    """A block of a prefix."""

    __slots__ = ("parent", "prompts", "salt", "tokens", "weight")

    def __init__(self, parent: int | None, tokens: bytes, salt: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.salt = salt
        self.weight = 0.0
        self.prompts = 0


class HotPrefixes:
    """The prefixes of one tokenizer's prompts."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Keep at most `capacity` blocks."""
        self._capacity = max(1, capacity)
        self._clock = clock
        self._start = clock()
        self._blocks: dict[int, _PrefixBlock] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def count_prompt(self, names: Sequence[int], prompt: Int32, salt: bytes) -> None:
        """Count a prompt.

        Args:
            names: of its full blocks, in their order.
            prompt: its token ids, int32 [n].
            salt: the one that the names were made with.
        """
        weight, parent = self._weight_now(), None
        for place, name in enumerate(names[:MAX_PROMPT_BLOCKS]):
            block = self._blocks.get(name)
            if block is None:
                ids = prompt[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS]
                block = self._blocks[name] = _PrefixBlock(
                    parent, ids.astype("<i4", copy=False).tobytes(), salt
                )
            block.weight += weight
            block.prompts += 1
            parent = name
        if len(self._blocks) > self._capacity:
            self._evict()

    def find_hottest(self, tokens: int) -> list[HotPrefix]:
        """Return the heaviest prefixes that two prompts at least had, of at most `tokens` tokens in all.

        None of them is the beginning of another. The heaviest come first.
        """
        shared = [(-block.weight, place, name) for place, (name, block) in enumerate(self._blocks.items())
                  if block.prompts > 1]  # fmt: skip
        # Of equal weights the block that is nearer to the root was added first.
        chosen = {name: weight for weight, _, name in nsmallest(tokens // BLOCK_TOKENS, shared)}
        inner = {self._blocks[name].parent for name in chosen}
        ends = sorted((weight, name) for name, weight in chosen.items() if name not in inner)
        return [self._prefix(name) for _, name in ends]

    def _prefix(self, name: int) -> HotPrefix:
        names, parts = list[int](), list[bytes]()
        step: int | None = name
        while step is not None:
            block = self._blocks[step]
            names.append(step)
            parts.append(block.tokens)
            step = block.parent
        tokens = np.frombuffer(b"".join(reversed(parts)), dtype="<i4")
        return HotPrefix(tokens, self._blocks[name].salt, tuple(reversed(names)))

    def _weight_now(self) -> float:
        weight = 2.0 ** min(1000.0, (self._clock() - self._start) / HALF_LIFE_SECONDS)
        if weight <= REBASE_WEIGHT:
            return weight
        for block in self._blocks.values():
            block.weight /= weight
        self._start = self._clock()
        return 1.0

    def _evict(self) -> None:
        """Drop the lightest eighth; never a block before one that stays."""
        count = len(self._blocks) - self._capacity + self._capacity // 8
        order = sorted(
            ((block.weight, -place, name) for place, (name, block) in enumerate(self._blocks.items()))
        )
        for _, _, name in order[:count]:
            del self._blocks[name]
