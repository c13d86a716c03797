# SPDX-License-Identifier: Apache-2.0
"""Chained hashes of prompt blocks, which engines and gateways compute identically.

A prefix is divided into blocks of `BLOCK_TOKENS` tokens, independent of the page size. The hash of block i
covers the hash of block i-1 and the block's token ids, so one 64-bit number identifies the whole prefix up to
the block's end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from mizzen.core.request import Int32

BLOCK_TOKENS = 64
"""Number of tokens in a block."""


def root_hash(salt: bytes) -> int:
    """Return the hash of the empty prefix for a cache salt; it is the parent of the first block."""
    return int.from_bytes(hashlib.blake2b(salt, digest_size=8).digest(), "little")


def next_hash(parent: int, tokens: Int32) -> int:
    """Return the hash of a block, given the hash of the previous block.

    Args:
        parent: hash of the previous block, or `root_hash` for the first one.
        tokens: token ids of the block, int32 [BLOCK_TOKENS].
    """
    digest = hashlib.blake2b(
        tokens.astype("<i4", copy=False).tobytes(), digest_size=8, key=parent.to_bytes(8, "little")
    )
    return int.from_bytes(digest.digest(), "little")


def block_hashes(tokens: Int32, salt: bytes = b"") -> Iterator[int]:
    """Yield the hashes of the full blocks of a prompt (int32 [n]), shortest prefix first."""
    block_hash = root_hash(salt)
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        block_hash = next_hash(block_hash, tokens[end - BLOCK_TOKENS : end])
        yield block_hash
