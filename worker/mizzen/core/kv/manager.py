"""KV pages and slots of the device: who holds them, and the two tables indexed by slot."""

from __future__ import annotations

import numpy as np

from mizzen.core.config import SchedulerConfig
from mizzen.core.inflight import Release
from mizzen.core.kv.page_pool import PagePool
from mizzen.core.kv.prefix_cache import make_cache
from mizzen.core.kv.radix_cache import Duplicate
from mizzen.core.kv.radix_node import Node
from mizzen.core.request import Int32
from mizzen.core.sequence import Sequence


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
        self._slot_of: Int32 = np.broadcast_to(np.arange(slots, dtype=np.int32)[:, None], self.table.shape)
        self._column_of: Int32 = np.arange(config.columns, dtype=np.int32)
        self._evict_ahead = min(self.columns(4 * slots), config.pages_total // 64)

    @property
    def available(self) -> int:
        """Pages that `take` can give."""
        return self.pool.free + self.cache.evictable

    def columns(self, tokens: int) -> int:
        """Return how many pages hold so many tokens."""
        return -(-tokens // self.page_size)

    def cells(self, slot: int, first: int, end: int) -> tuple[Int32, Int32]:
        """Return the slots and the columns of a run of one row's cells, as views."""
        return self._slot_of[slot, first:end], self._column_of[first:end]

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
        if sequence.whole:
            return 0
        return (len(sequence.tokens) - 1) // self.page_size

    def match(self, sequence: Sequence) -> Node:
        """Find and lock the longest cached prefix of a waiting request."""
        node = self.cache.match(
            sequence.data_bytes(), self.matchable(sequence), sequence.request.salt, sequence.known
        )
        self.cache.lock(node)
        return node

    def allocate(self, sequence: Sequence, node: Node, reserve: int) -> bool:
        """Give a waiting request a slot and pages for all its known tokens, behind its cached prefix.

        Leaves at least `reserve` pages available; False (and nothing taken) when that cannot be.
        """
        known = len(sequence.tokens)
        columns = self.columns(known)
        need = columns - node.end
        pages = self.take(need) if need + reserve <= self.available else None
        if pages is None:
            return False
        slot = self.free_slots.pop()
        self.holders[slot] = sequence
        row = self.table[slot]
        self.cache.fill(node, row, sequence.request.priority)
        row[node.end : columns] = pages
        self.tokens[slot, :known] = sequence.tokens
        sequence.slot, sequence.node, sequence.pages_held = slot, node, columns
        sequence.known = None
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
        slot, size = sequence.slot, self.page_size
        data = self.tokens[slot, start * size : full * size].tobytes()
        own = self.table[slot, start:full]
        sequence.node, found = self.cache.extend(node, data, own, sequence.request.priority)
        return [Duplicate(start + first, pages) for first, pages in found] if found else found

    def adopt(self, sequence: Sequence, duplicates: list[Duplicate]) -> Int32:
        """Point a row at the tree's pages; return the own ones, to be released behind a fence."""
        row, own = self.table[sequence.slot], []
        for first, pages in duplicates:
            end = first + len(pages)
            own.append(row[first:end].copy())
            row[first:end] = pages
        return np.concatenate(own)

    def surrender(self, sequence: Sequence, computed: int, known: int) -> Release:
        """Return what an ending request holds; it stays where it is until it is released.

        Args:
            sequence: holds a slot; it is left without one.
            computed: tokens whose KV the launched steps write.
            known: tokens whose ids are known.
        """
        size = self.page_size
        held, full = -(-computed // size), (computed if computed < known else known) // size
        if held < sequence.pages_held:
            held = sequence.pages_held
        release = Release(sequence.slot, sequence.node, full, held)
        sequence.slot, sequence.node, sequence.pages_held = -1, None, 0
        return release

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
        """Cache what was computed, and make the rest reusable. No step may use it any more."""
        slot, node = release.slot, release.node
        if node is not None:
            self._retire(slot, node, release.full, release.held)
        if release.pages is not None:
            self.pool.give(release.pages)
        if slot >= 0:
            self.holders[slot] = None
            self.free_slots.append(slot)

    def fenced_pages(self, release: Release) -> Int32:
        """Return the pages that wait for a fence."""
        if release.node is not None:
            return self.table[release.slot, release.node.end : release.held]
        return self._column_of[:0] if release.pages is None else release.pages

    def _retire(self, slot: int, node: Node, full: int, held: int) -> None:
        start, row, size = node.end, self.table[slot], self.page_size
        if full > start:
            data = self.tokens[slot, start * size : full * size].tobytes()
            holder = self.holders[slot]
            priority = 0 if holder is None else holder.request.priority
            for pages in self.cache.deposit(node, data, row[start:full], priority):
                self.pool.give(pages)
            start = full
        else:
            self.cache.unlock(node)
        if held > start:
            self.pool.give(row[start:held])

    def _evict(self, count: int) -> None:
        for pages in self.cache.evict(count):
            self.pool.give(pages)
