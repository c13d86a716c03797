"""The names of the blocks that a prefix tree holds, and how they changed.

Hashing is put off until somebody asks, so steps do not pay for it. A block belongs to the node that holds its
last token. Where pages do not divide blocks, two nodes may hold one block; it is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mizzen.core.kv.block_hashes import BLOCK_TOKENS, next_hash, root_hash
from mizzen.core.outputs import CacheEvents

if TYPE_CHECKING:
    from mizzen.core.kv.radix_node import Node

_BLOCK_BYTES = 4 * BLOCK_TOKENS


class BlockNames:
    """A ledger that the tree keeps informed; `node.names` is None until a node's blocks are named."""

    __slots__ = ("_counts", "_evicted", "_page_size", "_stored", "_unnamed")

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._counts: dict[int, int] = {}
        self._unnamed: dict[Node, None] = {}
        self._stored: dict[int, None] = {}
        self._evicted: dict[int, None] = {}

    def added(self, node: Node) -> None:
        """A node joined the tree."""
        self._unnamed[node] = None

    def split(self, upper: Node, lower: Node) -> None:
        """The first part of `lower` became `upper`, its parent."""
        if lower.names is None:
            self._unnamed[upper] = None
            return
        border = self._blocks(upper.end) - self._blocks(upper.start)
        upper.names, lower.names = lower.names[:border], lower.names[border:]

    def trimmed(self, node: Node) -> None:
        """A node lost its last pages."""
        if node.names is None:
            return
        keep = self._blocks(node.end) - self._blocks(node.start)
        for name in node.names[keep:]:
            self._uncount(name)
        node.names = node.names[:keep]

    def removed(self, node: Node) -> None:
        """A node left the tree."""
        if node.names is None:
            self._unnamed.pop(node, None)
            return
        for name in node.names:
            self._uncount(name)

    def take(self) -> CacheEvents:
        """Return the changes since the last call."""
        self._name_all()
        events = CacheEvents(tuple(self._stored), tuple(self._evicted))
        self._stored.clear()
        self._evicted.clear()
        return events

    def snapshot(self) -> tuple[int, ...]:
        """Return the names of all blocks held."""
        self._name_all()
        return tuple(self._counts)

    def _blocks(self, pages: int) -> int:
        return pages * self._page_size // BLOCK_TOKENS

    def _name_all(self) -> None:
        for node in self._unnamed:
            path = []
            above: Node | None = node
            while above is not None and above.names is None:
                path.append(above)
                above = above.parent
            for unnamed in reversed(path):
                self._name(unnamed)
        self._unnamed.clear()

    def _name(self, node: Node) -> None:
        """Name a node's blocks; its ancestors' are named."""
        data, name = self._carry(node)
        node.names = []
        for start in range(0, len(data) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
            name = next_hash(name, np.frombuffer(data, np.int32, BLOCK_TOKENS, start))
            node.names.append(name)
            self._count(name)

    def _carry(self, node: Node) -> tuple[bytes, int]:
        """Return a node's tokens from the last block border before it on, and the name of the block there."""
        missing = 4 * (node.start * self._page_size % BLOCK_TOKENS)
        parts = [node.data]
        above = node.parent
        while above is not None and missing:
            part = above.data[-missing:]
            parts.append(part)
            missing -= len(part)
            above = above.parent
        name, above = None, node.parent
        while name is None and above is not None:
            if above.names:
                name = above.names[-1]
            elif above.parent is None:
                name = root_hash(above.salt)
            above = above.parent
        assert name is not None
        return b"".join(reversed(parts)), name

    def _count(self, name: int) -> None:
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        if not count and self._evicted.pop(name, 0) == 0:
            self._stored[name] = None

    def _uncount(self, name: int) -> None:
        self._counts[name] -= 1
        if self._counts[name]:
            return
        del self._counts[name]
        if self._stored.pop(name, 0) == 0:
            self._evicted[name] = None
