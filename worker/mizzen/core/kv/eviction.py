# SPDX-License-Identifier: Apache-2.0
"""Eviction strategies of the prefix cache, one function each, and the heap of nodes that may be evicted."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol


class Evictable(Protocol):
    """Attributes of a prefix-cache node that eviction uses."""

    created: int
    """Logical time at which the node was inserted."""
    used: int
    """Logical time of the last use."""
    hits: int
    """Number of requests that found the node's pages in the cache."""
    priority: int
    """Highest priority of the requests that used the node."""
    heap_entry: int
    """Serial number of the node's valid entry in the `EvictionHeap`; 0 if the node must not be evicted."""


Priority = tuple[int, int]
"""Eviction priority of a node: the node with the lowest one is evicted first."""
Strategy = Callable[[Evictable], Priority]
"""Function that computes the eviction priority of a node."""


def least_recently_used(node: Evictable) -> Priority:
    """Evict the least recently used node first (LRU)."""
    return (node.used, 0)


def least_frequently_used(node: Evictable) -> Priority:
    """Evict the node with the fewest hits first; among equals, the least recently used (LFU)."""
    return (node.hits, node.used)


def first_in_first_out(node: Evictable) -> Priority:
    """Evict the oldest node first, regardless of its use (FIFO)."""
    return (node.created, node.used)


def most_recently_used(node: Evictable) -> Priority:
    """Evict the most recently used node first (MRU).

    This suits cyclic access to more prefixes than the cache can hold.
    """
    return (-node.used, 0)


def segmented(node: Evictable) -> Priority:
    """Evict nodes with at most one hit before nodes with more (SLRU).

    Within each of these two segments, the least recently used node is evicted first.
    """
    return (int(node.hits > 1), node.used)


def lowest_priority(node: Evictable) -> Priority:
    """Evict the node with the lowest request priority first; among equals, the least recently used."""
    return (node.priority, node.used)


STRATEGIES: dict[str, Strategy] = {
    "lru": least_recently_used,
    "lfu": least_frequently_used,
    "fifo": first_in_first_out,
    "mru": most_recently_used,
    "slru": segmented,
    "priority": lowest_priority,
}


class EvictionHeap:
    """Heap of the nodes that may be evicted, lowest eviction priority first.

    Entries of withdrawn nodes stay in the heap and are dropped later. The eviction priority of a node must
    not change while the node is in the heap: withdraw the node before using it.
    """

    __slots__ = ("_entries", "_last_entry", "_priority", "_valid")

    def __init__(self, strategy: Strategy) -> None:
        self._priority = strategy
        self._entries: list[tuple[int, int, int, Evictable]] = []
        self._last_entry = 0
        """Serial number of the newest heap entry."""
        self._valid = 0
        """Number of valid heap entries."""

    def __len__(self) -> int:
        return self._valid

    def offer(self, node: Evictable) -> None:
        """Add a node to the heap, or update its eviction priority."""
        if node.heap_entry:
            self.withdraw(node)
        self._last_entry += 1
        self._valid += 1
        node.heap_entry = self._last_entry
        heapq.heappush(self._entries, (*self._priority(node), self._last_entry, node))
        if len(self._entries) > 4 * self._valid + 256:
            self._entries = [entry for entry in self._entries if entry[3].heap_entry == entry[2]]
            heapq.heapify(self._entries)

    def withdraw(self, node: Evictable) -> None:
        """Invalidate the heap entry of a node, if it has one, so that the node is not evicted."""
        if node.heap_entry:
            node.heap_entry = 0
            self._valid -= 1

    def pop(self) -> Evictable | None:
        """Remove and return the node to evict next, or None if the heap is empty."""
        while self._entries:
            _, _, entry, node = heapq.heappop(self._entries)
            if node.heap_entry == entry:
                node.heap_entry = 0
                self._valid -= 1
                return node
        return None
