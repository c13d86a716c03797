"""KV pages and slots of the device: who holds them, and the two tables indexed by slot."""

from __future__ import annotations

import numpy as np

from mizzen.core.cache import make_cache
from mizzen.core.config import SchedulerConfig
from mizzen.core.flight import Release
from mizzen.core.pages import PagePool
from mizzen.core.radix import Duplicate, Node
from mizzen.core.request import Int32
from mizzen.core.sequence import Sequence

_NO_PAGES = np.empty(0, np.int32)


class KvMemory:
    """A mirror of page table and tokens, the free pages, the free slots and the prefix cache."""

    def __init__(self, config: SchedulerConfig) -> None:
        slots = config.max_running_requests
        self.page_size = config.page_size
        self.pool = PagePool(config.pages_total)
        self.cache = make_cache(config)
        self.free_slots = list(range(slots - 1, -1, -1))
        self.holders: list[Sequence | None] = [None] * slots
        """Who has each slot, until its fence."""
        self.table: Int32 = np.zeros((slots, config.columns), np.int32)
        self.tokens: Int32 = np.zeros((slots, config.capacity_tokens), np.int32)
        """Known token ids of each slot's request, by position."""
        self.flat_table = self.table.reshape(-1)
        self.flat_tokens = self.tokens.reshape(-1)
        self._evict_ahead = min(1024, config.pages_total // 64)

    @property
    def available(self) -> int:
        """Pages that `take` can give."""
        return self.pool.free + self.cache.evictable

    def columns(self, tokens: int) -> int:
        """Return how many pages hold so many tokens."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> Int32 | None:
        """Return free pages, evicting cached ones if need be; None when there are too few."""
        if count > self.pool.free:
            if count > self.available:
                return None
            self._evict(max(count - self.pool.free, self._evict_ahead))
        return self.pool.take(count)

    def matchable(self, sequence: Sequence) -> int:
        """Return how many pages of a waiting request may come from the cache.

        Its last known token is always run again: the next one is sampled from what that gives.
        """
        return (len(sequence.tokens) - 1) // self.page_size

    def match(self, sequence: Sequence) -> Node:
        """Find and lock the longest cached prefix of a waiting request."""
        node = self.cache.match(sequence.data_bytes(), self.matchable(sequence), sequence.request.salt)
        self.cache.lock(node)
        return node

    def seize(self, sequence: Sequence, node: Node, reserve: int) -> bool:
        """Give a waiting request a slot and pages for all its known tokens, behind its cached prefix.

        Leaves at least `reserve` pages available; False (and nothing taken) when that cannot be.
        """
        known = len(sequence.tokens)
        columns = self.columns(known)
        sequence.need = columns - node.end
        pages = self.take(sequence.need) if sequence.need + reserve <= self.available else None
        if pages is None:
            return False
        slot = self.free_slots.pop()
        self.holders[slot] = sequence
        row = self.table[slot]
        self.cache.fill(node, row)
        row[node.end : columns] = pages
        self.tokens[slot, :known] = sequence.tokens
        sequence.slot, sequence.node, sequence.pages_held = slot, node, columns
        sequence.computed = node.end * self.page_size
        return True

    def publish(self, sequence: Sequence, tokens: int) -> list[Duplicate]:
        """Move the full pages of the first `tokens` tokens into the prefix cache.

        The duplicates' positions are columns of the page table; the table still holds the own pages there.
        """
        node, full = sequence.node, tokens // self.page_size
        assert node is not None
        start = node.end
        if full <= start:
            return []
        data = self.tokens[sequence.slot, start * self.page_size : full * self.page_size].tobytes()
        sequence.node, found = self.cache.extend(node, data, self.table[sequence.slot, start:full])
        return [Duplicate(start + first, pages) for first, pages in found]

    def adopt(self, sequence: Sequence, duplicates: list[Duplicate]) -> Int32:
        """Point a row at the tree's pages; return the own ones, to be released behind a fence."""
        row, own = self.table[sequence.slot], []
        for first, pages in duplicates:
            end = first + len(pages)
            own.append(row[first:end].copy())
            row[first:end] = pages
        return np.concatenate(own) if own else _NO_PAGES

    def surrender(self, sequence: Sequence, computed: int, known: int) -> Release:
        """Cache what an ending request computed and return the rest of what it holds.

        Args:
            sequence: holds a slot; it is left without one.
            computed: tokens whose KV the launched steps write.
            known: tokens whose ids are known.
        """
        slot, held = sequence.slot, max(self.columns(computed), sequence.pages_held)
        own = self.adopt(sequence, self.publish(sequence, min(computed, known)))
        node = sequence.node
        assert node is not None
        rest = self.table[slot, node.end : held]
        pages = np.concatenate((own, rest)) if len(own) else rest.copy()
        sequence.slot, sequence.node, sequence.pages_held = -1, None, 0
        return Release(pages, slot, node)

    def promised(self, sequence: Sequence, computed: int) -> int:
        """Return how many pages would come free or evictable if a request ended (at least)."""
        above = sequence.node
        assert above is not None
        pages = max(self.columns(computed), sequence.pages_held) - above.end
        while above is not None:
            if above.refs == 1:
                pages += len(above.pages)
            above = above.parent
        return pages

    def release(self, release: Release) -> None:
        """Make what was held reusable. No step may use it any more."""
        self.pool.give(release.pages)
        if release.slot is not None:
            self.holders[release.slot] = None
            self.free_slots.append(release.slot)
        if release.node is not None:
            self.cache.unlock(release.node)

    def _evict(self, count: int) -> None:
        for pages in self.cache.evict(count):
            self.pool.give(pages)
