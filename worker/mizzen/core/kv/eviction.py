"""Eviction policies of the prefix cache, one function each, and the lazily cleaned heap of candidates."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol


class Evictable(Protocol):
    """The attributes of a node that eviction strategies use."""

    born: int
    """Logical time of the first use."""
    used: int
    """Logical time of the last use."""
    hits: int
    """Number of requests that used the node."""
    priority: int
    """Highest priority of the requests that used the node."""
    ticket: int
    """Number of the node's valid heap entry; 0 if it must not be evicted."""


Priority = tuple[int, int]
Strategy = Callable[[Evictable], Priority]


def least_recently_used(node: Evictable) -> Priority:
    """Evict the least recently used node first (LRU)."""
    return (node.used, 0)


def least_frequently_used(node: Evictable) -> Priority:
    """Evict the node with the fewest hits first, then the least recently used (LFU)."""
    return (node.hits, node.used)


def first_in_first_out(node: Evictable) -> Priority:
    """Evict the oldest node first, regardless of its use (FIFO)."""
    return (node.born, node.used)


def most_recently_used(node: Evictable) -> Priority:
    """Evict the most recently used node first (MRU), for cyclic access to more prefixes than fit."""
    return (-node.used, 0)


def segmented(node: Evictable) -> Priority:
    """Evict nodes with at most one hit first, then the others; least recently used first in both (SLRU)."""
    return (int(node.hits > 1), node.used)


def lowest_priority(node: Evictable) -> Priority:
    """Evict the node whose users have the lowest priority first, then the least recently used."""
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
    """Heap of evictable nodes, the lowest eviction priority first.

    A node's eviction priority must not change while its ticket is valid: withdraw a node before using it.
    """

    __slots__ = ("_entries", "_priority", "_tickets", "_valid")

    def __init__(self, strategy: Strategy) -> None:
        self._priority = strategy
        self._entries: list[tuple[int, int, int, Evictable]] = []
        self._tickets = 0
        self._valid = 0

    def __len__(self) -> int:
        return self._valid

    def offer(self, node: Evictable) -> None:
        """Add a node to the candidates."""
        if node.ticket:
            self.withdraw(node)
        self._tickets += 1
        self._valid += 1
        node.ticket = self._tickets
        heapq.heappush(self._entries, (*self._priority(node), self._tickets, node))
        if len(self._entries) > 4 * self._valid + 256:
            self._entries = [entry for entry in self._entries if entry[3].ticket == entry[2]]
            heapq.heapify(self._entries)

    def withdraw(self, node: Evictable) -> None:
        """Remove a node from the candidates; its heap entry is dropped when it is reached."""
        if node.ticket:
            node.ticket = 0
            self._valid -= 1

    def pop(self) -> Evictable | None:
        """Remove and return the next candidate, or None if there is none."""
        while self._entries:
            _, _, ticket, node = heapq.heappop(self._entries)
            if node.ticket == ticket:
                node.ticket = 0
                self._valid -= 1
                return node
        return None
