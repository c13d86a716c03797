# SPDX-License-Identifier: Apache-2.0
"""Block hashes of the prefix cache, and the events that report blocks stored and evicted.

Gateways use these events for prefix-aware routing. Blocks are hashed only when events are requested, not
during steps. A block belongs to the node that holds its last token. If the page size does not divide the
block size, several nodes may hold the same block, so the nodes of each block are counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mizzen.core.kv.block_hashes import BLOCK_TOKENS, next_hash, root_hash
from mizzen.core.outputs import CacheEvents

if TYPE_CHECKING:
    from mizzen.core.kv.radix_node import RadixNode

_BLOCK_BYTES = 4 * BLOCK_TOKENS


class BlockHashLedger:
    """Tracks which blocks the radix tree holds; the tree reports every change of a node to it.

    `node.block_hashes` is None until the blocks of a node are hashed.
    """

    __slots__ = ("_counts", "_evicted", "_page_size", "_stored", "_unhashed")

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._counts: dict[int, int] = {}
        """Number of nodes that hold each block, by hash."""
        self._unhashed: dict[RadixNode, None] = {}
        """Nodes whose blocks are not hashed yet, in order of insertion."""
        self._stored: dict[int, None] = {}
        """Hashes of blocks stored since the last `drain`."""
        self._evicted: dict[int, None] = {}
        """Hashes of blocks evicted since the last `drain`."""

    def added(self, node: RadixNode) -> None:
        """Record that a node was added to the tree."""
        self._unhashed[node] = None

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """Record that the first pages of `lower` moved into its new parent `upper`."""
        if lower.block_hashes is None:
            self._unhashed[upper] = None
            return
        border = self._blocks(upper.end) - self._blocks(upper.start)
        upper.block_hashes, lower.block_hashes = lower.block_hashes[:border], lower.block_hashes[border:]

    def trimmed(self, node: RadixNode) -> None:
        """Record that the last pages of a node were evicted."""
        if node.block_hashes is None:
            return
        keep = self._blocks(node.end) - self._blocks(node.start)
        for block_hash in node.block_hashes[keep:]:
            self._uncount(block_hash)
        node.block_hashes = node.block_hashes[:keep]

    def removed(self, node: RadixNode) -> None:
        """Record that a node was removed from the tree."""
        if node.block_hashes is None:
            self._unhashed.pop(node, None)
            return
        for block_hash in node.block_hashes:
            self._uncount(block_hash)

    def drain(self) -> CacheEvents:
        """Return the blocks stored and evicted since the last call."""
        self._hash_all()
        events = CacheEvents(tuple(self._stored), tuple(self._evicted))
        self._stored.clear()
        self._evicted.clear()
        return events

    def snapshot(self) -> tuple[int, ...]:
        """Return the hashes of all cached blocks."""
        self._hash_all()
        return tuple(self._counts)

    def _blocks(self, pages: int) -> int:
        return pages * self._page_size // BLOCK_TOKENS

    def _hash_all(self) -> None:
        for node in self._unhashed:
            path = []
            ancestor: RadixNode | None = node
            while ancestor is not None and ancestor.block_hashes is None:
                path.append(ancestor)
                ancestor = ancestor.parent
            for unhashed in reversed(path):
                self._hash_blocks(unhashed)
        self._unhashed.clear()

    def _hash_blocks(self, node: RadixNode) -> None:
        """Compute the block hashes of a node; the hashes of its ancestors must have been computed before."""
        data, block_hash = self._tokens_from_boundary(node)
        node.block_hashes = []
        for start in range(0, len(data) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
            block_hash = next_hash(block_hash, np.frombuffer(data, np.int32, BLOCK_TOKENS, start))
            node.block_hashes.append(block_hash)
            self._count(block_hash)

    def _tokens_from_boundary(self, node: RadixNode) -> tuple[bytes, int]:
        """Return the bytes of the tokens from a block boundary to the end of a node, and a parent hash.

        The boundary is the last one at or before the start of the node. The parent hash is the hash of the
        block that ends at the boundary.
        """
        missing = 4 * (node.start * self._page_size % BLOCK_TOKENS)
        parts = [node.token_bytes]
        ancestor = node.parent
        while ancestor is not None and missing:
            part = ancestor.token_bytes[-missing:]
            parts.append(part)
            missing -= len(part)
            ancestor = ancestor.parent
        block_hash, ancestor = None, node.parent
        while block_hash is None and ancestor is not None:
            if ancestor.block_hashes:
                block_hash = ancestor.block_hashes[-1]
            elif ancestor.parent is None:
                block_hash = root_hash(ancestor.salt)
            ancestor = ancestor.parent
        assert block_hash is not None
        return b"".join(reversed(parts)), block_hash

    def _count(self, block_hash: int) -> None:
        count = self._counts.get(block_hash, 0)
        self._counts[block_hash] = count + 1
        if not count and self._evicted.pop(block_hash, 0) == 0:
            self._stored[block_hash] = None

    def _uncount(self, block_hash: int) -> None:
        self._counts[block_hash] -= 1
        if self._counts[block_hash]:
            return
        del self._counts[block_hash]
        if self._stored.pop(block_hash, 0) == 0:
            self._evicted[block_hash] = None
