"""Names for prefixes that engines and gateways compute alike.

A prefix is cut into blocks of `BLOCK_TOKENS` tokens (whatever the page size); the name of block i is a hash
of the name of block i-1 and the block's token ids, so one 64-bit number stands for the whole prefix up to its
end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from mizzen.core.request import Int32

BLOCK_TOKENS = 64


def root_hash(salt: bytes) -> int:
    """Return the name of the empty prefix under a cache salt."""
    return int.from_bytes(hashlib.blake2b(salt, digest_size=8).digest(), "little")


def next_hash(parent: int, tokens: Int32) -> int:
    """Return the name of the block of `tokens` (int32 [BLOCK_TOKENS]) that follows the block `parent`."""
    digest = hashlib.blake2b(
        tokens.astype("<i4", copy=False).tobytes(), digest_size=8, key=parent.to_bytes(8, "little")
    )
    return int.from_bytes(digest.digest(), "little")


def block_hashes(tokens: Int32, salt: bytes = b"") -> Iterator[int]:
    """Yield the names of the full blocks of a prompt, shortest prefix first."""
    name = root_hash(salt)
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        name = next_hash(name, tokens[end - BLOCK_TOKENS : end])
        yield name
