# SPDX-License-Identifier: Apache-2.0
"""Interface of the prefix cache, and an implementation that caches nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from mizzen.core.config import SchedulerConfig
from mizzen.core.kv.eviction import STRATEGIES
from mizzen.core.kv.radix_cache import CachedPrefix, DuplicatePages, RadixTree
from mizzen.core.kv.radix_node import RadixNode
from mizzen.core.outputs import CacheEvents
from mizzen.core.request import Int32


class PrefixCache(Protocol):
    """Interface of a prefix cache; `RadixTree` documents the methods in more detail."""

    evictable: int
    """Number of pages in unlocked nodes."""
    additions: int
    """Number of nodes added so far; serves as a version number of the contents."""

    def match(self, data: bytes, limit: int, salt: bytes, known: RadixNode | None = None) -> RadixNode:
        """Return the last node of the longest cached prefix; the caller locks it before the next call."""
        ...

    def peek(self, data: bytes, limit: int, salt: bytes, known: RadixNode | None = None) -> CachedPrefix:
        """Return the longest cached prefix without changing the cache."""
        ...

    def fill_row(self, node: RadixNode, row: Int32, priority: int = 0) -> None:
        """Write the pages from the root to a locked node into a page-table row, int32 [columns]."""
        ...

    def lock(self, node: RadixNode) -> None:
        """Lock a node and its ancestors against eviction."""
        ...

    def unlock(self, node: RadixNode) -> None:
        """Release one lock of a node and its ancestors."""
        ...

    def insert_locked(
        self, node: RadixNode, data: bytes, pages: Int32, priority: int = 0
    ) -> tuple[RadixNode, list[DuplicatePages]]:
        """Insert pages below a locked node, and move the lock to the node of the last page.

        Returns the node that is now locked, and the cache's pages for tokens that it already held.
        """
        ...

    def insert_and_unlock(self, node: RadixNode, data: bytes, pages: Int32, priority: int = 0) -> list[Int32]:
        """Insert pages below a locked node, and release the lock.

        Returns the pages that the caller must free, because the cache already held pages for their tokens.
        """
        ...

    def evict(self, count: int) -> list[Int32]:
        """Evict up to `count` unlocked pages, and return their numbers as int32 arrays."""
        ...

    def drain_events(self) -> CacheEvents:
        """Return the blocks stored and evicted since the last call."""
        ...

    def snapshot(self) -> tuple[int, ...]:
        """Return the hashes of all cached blocks."""
        ...

    def nodes(self) -> Iterator[RadixNode]:
        """Yield all nodes, roots included."""
        ...


class NoPrefixCache:
    """A prefix cache that matches and caches nothing, for benchmarks and for `--prefix-cache none`."""

    def __init__(self) -> None:
        self.evictable = self.additions = 0
        self._root = RadixNode(None, b"", np.empty(0, np.int32))

    def match(self, data: bytes, limit: int, salt: bytes, known: RadixNode | None = None) -> RadixNode:
        """Return the empty prefix."""
        return self._root

    def peek(self, data: bytes, limit: int, salt: bytes, known: RadixNode | None = None) -> CachedPrefix:
        """Return the empty prefix."""
        return CachedPrefix(self._root, None, 0)

    def fill_row(self, node: RadixNode, row: Int32, priority: int = 0) -> None:
        """Write nothing, because the empty prefix has no pages."""

    def lock(self, node: RadixNode) -> None:
        """Count a lock of the empty prefix."""
        node.lock_count += 1

    def unlock(self, node: RadixNode) -> None:
        """Release one lock of the empty prefix."""
        node.lock_count -= 1

    def insert_locked(
        self, node: RadixNode, data: bytes, pages: Int32, priority: int = 0
    ) -> tuple[RadixNode, list[DuplicatePages]]:
        """Cache nothing: the caller keeps its pages."""
        return node, []

    def insert_and_unlock(self, node: RadixNode, data: bytes, pages: Int32, priority: int = 0) -> list[Int32]:
        """Release one lock and return all pages, which the caller must free."""
        node.lock_count -= 1
        return [pages]

    def evict(self, count: int) -> list[Int32]:
        """Return no pages."""
        return []

    def drain_events(self) -> CacheEvents:
        """Return no events."""
        return CacheEvents()

    def snapshot(self) -> tuple[int, ...]:
        """Return no blocks."""
        return ()

    def nodes(self) -> Iterator[RadixNode]:
        """Yield the only node, which is the empty prefix."""
        yield self._root


def make_cache(config: SchedulerConfig) -> PrefixCache:
    """Create the prefix cache that a configuration selects."""
    if config.prefix_cache == "none":
        return NoPrefixCache()
    return RadixTree(config.page_size, STRATEGIES[config.eviction])
