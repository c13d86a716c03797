# SPDX-License-Identifier: Apache-2.0
"""Keeps the hottest prefixes of prompts, with their tokens, so that a new engine's cache can be filled.

Prefixes form a tree of 64-token blocks, identified by `mizzen.core.kv.block_hashes`. Each prompt adds to the
weights of its blocks, and weights halve every `HALF_LIFE_SECONDS`. A block never weighs more than its parent,
so the heaviest blocks always form complete prefixes.

Privacy: this process keeps the token ids of at most `capacity` blocks in memory (256 bytes per block); a
block stays until heavier blocks displace it. A prefix is replayed under its own salt, so replays share
nothing between tenants.
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
"""Number of blocks counted per prompt; later blocks usually belong to one conversation only."""
REBASE_WEIGHT = 2.0**64
"""Weight of a new prompt above which all weights are scaled down.

Old weights are not halved as time passes; instead, each prompt adds more weight than earlier prompts did.
"""


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """Prefix that many prompts share."""

    tokens: Int32
    """Token ids, int32 [n]; n is a multiple of the block size."""
    salt: bytes
    """Salt with which the prompts were sent; it separates the prefix caches of tenants."""
    block_hashes: tuple[int, ...]
    """Hashes of the prefix's blocks, in order."""


class _PrefixBlock:
    """Node of the tree: a block of a prefix; `parent` is the hash of the block before it."""

    __slots__ = ("parent", "prompts", "salt", "tokens", "weight")

    def __init__(self, parent: int | None, tokens: bytes, salt: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.salt = salt
        self.weight = 0.0
        self.prompts = 0


class HotPrefixes:
    """Hot prefixes of the prompts that were tokenized with one tokenizer."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Create an empty tree of at most `capacity` blocks."""
        self._capacity = max(1, capacity)
        self._clock = clock
        self._start = clock()
        self._blocks: dict[int, _PrefixBlock] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def count_prompt(self, hashes: Sequence[int], prompt: Int32, salt: bytes) -> None:
        """Count a prompt: add its blocks to the tree, and increase their weights.

        Args:
            hashes: hashes of the prompt's full blocks, in order.
            prompt: token ids of the prompt, int32 [n].
            salt: salt with which the hashes were computed.
        """
        weight, parent = self._weight_now(), None
        for position, block_hash in enumerate(hashes[:MAX_PROMPT_BLOCKS]):
            block = self._blocks.get(block_hash)
            if block is None:
                ids = prompt[position * BLOCK_TOKENS : (position + 1) * BLOCK_TOKENS]
                block = self._blocks[block_hash] = _PrefixBlock(
                    parent, ids.astype("<i4", copy=False).tobytes(), salt
                )
            block.weight += weight
            block.prompts += 1
            parent = block_hash
        if len(self._blocks) > self._capacity:
            self._evict()

    def find_hottest(self, tokens: int) -> list[HotPrefix]:
        """Return the heaviest prefixes that at least two prompts share.

        Together, the prefixes have at most `tokens` tokens, with shared blocks counted once. The heaviest
        comes first. No returned prefix is a prefix of another.
        """
        shared = [
            (-block.weight, position, block_hash)
            for position, (block_hash, block) in enumerate(self._blocks.items())
            if block.prompts > 1
        ]
        # Of two blocks with equal weights, the one nearer to the root was added first, and is chosen first.
        chosen = {block_hash: weight for weight, _, block_hash in nsmallest(tokens // BLOCK_TOKENS, shared)}
        inner = {self._blocks[block_hash].parent for block_hash in chosen}
        ends = sorted(
            (weight, block_hash) for block_hash, weight in chosen.items() if block_hash not in inner
        )
        return [self._prefix(block_hash) for _, block_hash in ends]

    def _prefix(self, block_hash: int) -> HotPrefix:
        hashes, chunks = list[int](), list[bytes]()
        ancestor: int | None = block_hash
        while ancestor is not None:
            block = self._blocks[ancestor]
            hashes.append(ancestor)
            chunks.append(block.tokens)
            ancestor = block.parent
        tokens = np.frombuffer(b"".join(reversed(chunks)), dtype="<i4")
        return HotPrefix(tokens, self._blocks[block_hash].salt, tuple(reversed(hashes)))

    def _weight_now(self) -> float:
        weight = 2.0 ** min(1000.0, (self._clock() - self._start) / HALF_LIFE_SECONDS)
        if weight <= REBASE_WEIGHT:
            return weight
        for block in self._blocks.values():
            block.weight /= weight
        self._start = self._clock()
        return 1.0

    def _evict(self) -> None:
        """Drop the lightest eighth of the blocks, but never the ancestor of a block that stays."""
        count = len(self._blocks) - self._capacity + self._capacity // 8
        order = sorted(
            (
                (block.weight, -position, block_hash)
                for position, (block_hash, block) in enumerate(self._blocks.items())
            )
        )
        for _, _, block_hash in order[:count]:
            del self._blocks[block_hash]
