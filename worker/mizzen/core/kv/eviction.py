"""Which cached prefix goes first: one small function each, over a heap that is cleaned lazily."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol


class Evictable(Protocol):
    """What a strategy sees of a node."""

    born: int
    """Logical time of the first use."""
    used: int
    """Logical time of the last use."""
    hits: int
    """How many requests it served."""
    priority: int
    """The highest priority of the requests that used it."""
    ticket: int
    """Number of its valid entry in the heap; 0 when it must not be evicted."""


Priority = tuple[int, int]
Strategy = Callable[[Evictable], Priority]


def least_recently_used(node: Evictable) -> Priority:
    """Oldest use first."""
    return (node.used, 0)


def least_frequently_used(node: Evictable) -> Priority:
    """Fewest hits first, among equals the oldest use."""
    return (node.hits, node.used)


def first_in_first_out(node: Evictable) -> Priority:
    """Oldest first, however it was used since."""
    return (node.born, node.used)


def most_recently_used(node: Evictable) -> Priority:
    """Newest use first: for loops over more prefixes than fit."""
    return (-node.used, 0)


def segmented(node: Evictable) -> Priority:
    """Those that served one request at most, then the others; in both, oldest use first (SLRU)."""
    return (int(node.hits > 1), node.used)


def lowest_priority(node: Evictable) -> Priority:
    """Those that requests of low priority alone used first, among equals the oldest use."""
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
    """Candidates, lowest priority first.

    A node's priority must not change while its ticket is valid: whoever uses a node withdraws it first.
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
        """Make a node a candidate."""
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
        """Let a node be no candidate any more; its entry goes when it is met."""
        if node.ticket:
            node.ticket = 0
            self._valid -= 1

    def pop(self) -> Evictable | None:
        """Remove and return the next candidate."""
        while self._entries:
            _, _, ticket, node = heapq.heappop(self._entries)
            if node.ticket == ticket:
                node.ticket = 0
                self._valid -= 1
                return node
        return None
