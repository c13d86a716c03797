"""What the scheduler asks of a prefix cache, and the cache that keeps nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from mizzen.core.config import SchedulerConfig
from mizzen.core.kv.eviction import STRATEGIES
from mizzen.core.kv.radix_cache import Duplicate, Known, RadixTree
from mizzen.core.kv.radix_node import Node
from mizzen.core.outputs import CacheEvents
from mizzen.core.request import Int32


class PrefixCache(Protocol):
    """See `RadixTree`, which documents each method."""

    evictable: int
    additions: int

    def match(self, data: bytes, limit: int, salt: bytes, known: Node | None = None) -> Node: ...  # noqa: D102
    def look(self, data: bytes, limit: int, salt: bytes, known: Node | None = None) -> Known: ...  # noqa: D102
    def fill(self, node: Node, row: Int32, priority: int = 0) -> None: ...  # noqa: D102
    def lock(self, node: Node) -> None: ...  # noqa: D102
    def unlock(self, node: Node) -> None: ...  # noqa: D102
    def extend(  # noqa: D102
        self, node: Node, data: bytes, pages: Int32, priority: int = 0
    ) -> tuple[Node, list[Duplicate]]: ...
    def deposit(self, node: Node, data: bytes, pages: Int32, priority: int = 0) -> list[Int32]: ...  # noqa: D102
    def evict(self, count: int) -> list[Int32]: ...  # noqa: D102
    def take_events(self) -> CacheEvents: ...  # noqa: D102
    def snapshot(self) -> tuple[int, ...]: ...  # noqa: D102
    def nodes(self) -> Iterator[Node]: ...  # noqa: D102


class NoCache:
    """Matches nothing and keeps nothing."""

    def __init__(self) -> None:
        self.evictable = self.additions = 0
        self._root = Node(None, b"", np.empty(0, np.int32))

    def match(self, data: bytes, limit: int, salt: bytes, known: Node | None = None) -> Node:
        """Return the empty prefix."""
        return self._root

    def look(self, data: bytes, limit: int, salt: bytes, known: Node | None = None) -> Known:
        """Return the empty prefix."""
        return Known(self._root, None, 0)

    def fill(self, node: Node, row: Int32, priority: int = 0) -> None:
        """Write nothing: the empty prefix has no pages."""

    def lock(self, node: Node) -> None:
        """Count a lock of the empty prefix."""
        node.refs += 1

    def unlock(self, node: Node) -> None:
        """Undo one lock."""
        node.refs -= 1

    def extend(
        self, node: Node, data: bytes, pages: Int32, priority: int = 0
    ) -> tuple[Node, list[Duplicate]]:
        """Keep nothing: the pages stay the caller's."""
        return node, []

    def deposit(self, node: Node, data: bytes, pages: Int32, priority: int = 0) -> list[Int32]:
        """Undo one lock and keep nothing: return the pages."""
        node.refs -= 1
        return [pages]

    def evict(self, count: int) -> list[Int32]:
        """Return no pages."""
        return []

    def take_events(self) -> CacheEvents:
        """Return no events."""
        return CacheEvents()

    def snapshot(self) -> tuple[int, ...]:
        """Return no blocks."""
        return ()

    def nodes(self) -> Iterator[Node]:
        """Yield the empty prefix."""
        yield self._root


def make_cache(config: SchedulerConfig) -> PrefixCache:
    """Return the prefix cache that a configuration asks for."""
    if config.prefix_cache == "none":
        return NoCache()
    return RadixTree(config.page_size, STRATEGIES[config.eviction])
