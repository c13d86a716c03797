"""The prefix cache's interface, and an implementation that caches nothing."""

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
    """Interface of a prefix cache; `RadixTree` documents each method."""

    evictable: int
    additions: int

    def match(self, data: bytes, limit: int, salt: bytes, known: RadixNode | None = None) -> RadixNode: ...  # noqa: D102
    def peek(self, data: bytes, limit: int, salt: bytes, known: RadixNode | None = None) -> CachedPrefix: ...  # noqa: D102
    def fill_row(self, node: RadixNode, row: Int32, priority: int = 0) -> None: ...  # noqa: D102
    def lock(self, node: RadixNode) -> None: ...  # noqa: D102
    def unlock(self, node: RadixNode) -> None: ...  # noqa: D102
    def insert_locked(  # noqa: D102
        self, node: RadixNode, data: bytes, pages: Int32, priority: int = 0
    ) -> tuple[RadixNode, list[DuplicatePages]]: ...
    def insert_and_unlock(  # noqa: D102
        self, node: RadixNode, data: bytes, pages: Int32, priority: int = 0
    ) -> list[Int32]: ...
    def evict(self, count: int) -> list[Int32]: ...  # noqa: D102
    def drain_events(self) -> CacheEvents: ...  # noqa: D102
    def snapshot(self) -> tuple[int, ...]: ...  # noqa: D102
    def nodes(self) -> Iterator[RadixNode]: ...  # noqa: D102


class NoPrefixCache:
    """A prefix cache that matches and caches nothing, for comparison and `--prefix-cache none`."""

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
        """Release one lock and return all pages."""
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
        """Yield the empty prefix."""
        yield self._root


def make_cache(config: SchedulerConfig) -> PrefixCache:
    """Return the prefix cache that a configuration selects."""
    if config.prefix_cache == "none":
        return NoPrefixCache()
    return RadixTree(config.page_size, STRATEGIES[config.eviction])
