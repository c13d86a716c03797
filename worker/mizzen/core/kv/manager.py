# SPDX-License-Identifier: Apache-2.0
"""The KV manager: allocates pages and slots, and keeps the host's page table and tokens."""

from __future__ import annotations

import numpy as np

from mizzen.core.config import SchedulerConfig
from mizzen.core.inflight import DeferredFree
from mizzen.core.kv.page_pool import PagePool
from mizzen.core.kv.prefix_cache import make_cache
from mizzen.core.kv.radix_cache import DuplicatePages
from mizzen.core.kv.radix_node import RadixNode
from mizzen.core.outputs import Load
from mizzen.core.request import Int32
from mizzen.core.sequence import SequenceState


class KvManager:
    """Owns the free pages, the free slots, the prefix cache, and the host's page table and tokens."""

    def __init__(self, config: SchedulerConfig) -> None:
        slots = config.max_running_requests
        self.page_size = config.page_size
        self._keeps_kv = not config.whole_prompts
        self.pool = PagePool(config.pages_total)
        self.cache = make_cache(config)
        self.free_slots = list(range(slots - 1, -1, -1))
        self.slot_owners: list[SequenceState | None] = [None] * slots
        """Request in each slot; a request stays here until the last step that uses its slot is complete."""
        self.page_table: Int32 = np.zeros((slots, config.columns), np.int32)
        self.tokens: Int32 = np.zeros((slots, config.capacity_tokens), np.int32)
        """Ids of known tokens, int32 [slots, capacity_tokens], by slot and sequence position."""
        self.flat_page_table = self.page_table.reshape(-1)
        self.flat_tokens = self.tokens.reshape(-1)
        self._slot_of: Int32 = np.broadcast_to(
            np.arange(slots, dtype=np.int32)[:, None], self.page_table.shape
        )
        self._column_of: Int32 = np.arange(config.columns, dtype=np.int32)
        self._evict_ahead = min(self.pages_for(4 * slots), config.pages_total // 64)

    @property
    def available_pages(self) -> int:
        """Number of pages that can be allocated now: free pages and evictable pages."""
        return self.pool.free_count + self.cache.evictable

    def measure_load(self, running: int, waiting: int, waiting_tokens: int) -> Load:
        """Return the load with these numbers of requests and waiting tokens, and the current pages."""
        return Load(
            running=running,
            waiting=waiting,
            waiting_tokens=waiting_tokens,
            pages_total=self.pool.total,
            pages_used=self.pool.total - self.available_pages,
            pages_cached=self.cache.evictable,
        )

    def negative_tokens(self) -> set[int]:
        """Return the negative token ids, which stand for images, of the prefix cache and all slots in use."""
        used: set[int] = set()
        for node in self.cache.nodes():
            tokens = np.frombuffer(node.token_bytes, np.int32)
            used.update(tokens[tokens < 0].tolist())
        for slot, owner in enumerate(self.slot_owners):
            if owner is not None and owner.request.images:
                tokens = self.tokens[slot, : len(owner.request.prompt)]
                used.update(tokens[tokens < 0].tolist())
        return used

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that a sequence of `tokens` tokens needs; 0 if no KV is kept."""
        return -(-tokens // self.page_size) if self._keeps_kv else 0

    def table_indices(self, slot: int, first: int, end: int) -> tuple[Int32, Int32]:
        """Return the slots and columns of page-table entries `first` to `end` (exclusive) of a slot's row.

        Both are read-only views, int32 [end - first].
        """
        return self._slot_of[slot, first:end], self._column_of[first:end]

    def allocate_pages(self, count: int) -> Int32 | None:
        """Allocate `count` pages, evicting cached pages if necessary.

        Returns int32 [count], or None if fewer than `count` pages are available.
        """
        if count > self.pool.free_count:
            if count > self.available_pages:
                return None
            self._evict(max(count - self.pool.free_count, self._evict_ahead))
        return self.pool.allocate(count)

    def matchable_pages(self, sequence: SequenceState) -> int:
        """Return the maximum number of pages that a waiting request may take from the prefix cache.

        The last known token is always computed, because the next token is sampled from its logits.
        """
        if not self._keeps_kv:
            return 0
        return min(len(sequence.tokens) - 1, sequence.matchable_tokens) // self.page_size

    def match(self, sequence: SequenceState) -> RadixNode:
        """Find the longest cached prefix of a waiting request; lock and return its last node."""
        node = self.cache.match(
            sequence.tokens_as_bytes(),
            self.matchable_pages(sequence),
            sequence.request.salt,
            sequence.prefix_hint,
        )
        self.cache.lock(node)
        return node

    def allocate(self, sequence: SequenceState, node: RadixNode, reserve: int) -> bool:
        """Allocate a slot for a waiting request, and pages for its known tokens after the cached prefix.

        Args:
            sequence: the waiting request.
            node: last node of its cached prefix, locked by `match`.
            reserve: number of pages that must stay available after the allocation.

        Returns:
            False, without allocating anything, if fewer than `reserve` pages would stay available.
        """
        known = len(sequence.tokens)
        columns = self.pages_for(known)
        missing = columns - node.end
        pages = self.allocate_pages(missing) if missing + reserve <= self.available_pages else None
        if pages is None:
            return False
        slot = self.free_slots.pop()
        self.slot_owners[slot] = sequence
        row = self.page_table[slot]
        self.cache.fill_row(node, row, sequence.request.priority)
        row[node.end : columns] = pages
        self.tokens[slot, :known] = sequence.tokens
        sequence.slot, sequence.node, sequence.pages_held = slot, node, columns
        sequence.prefix_hint = None
        sequence.computed = node.end * self.page_size
        return True

    def cache_prefix(self, sequence: SequenceState, tokens: int) -> list[DuplicatePages]:
        """Move the full pages of a request's first `tokens` tokens into the prefix cache.

        Returns the pages that the cache already held for the same tokens, with their page-table columns. The
        page table still has the request's own pages in these columns; see `dedupe`.
        """
        node, full = sequence.node, tokens // self.page_size
        if not self._keeps_kv:
            return []
        assert node is not None
        start = node.end
        if full <= start:
            return []
        slot, size = sequence.slot, self.page_size
        data = self.tokens[slot, start * size : full * size].tobytes()
        own = self.page_table[slot, start:full]
        sequence.node, duplicates = self.cache.insert_locked(node, data, own, sequence.request.priority)
        return (
            [DuplicatePages(start + first, pages) for first, pages in duplicates]
            if duplicates
            else duplicates
        )

    def dedupe(self, sequence: SequenceState, duplicates: list[DuplicatePages]) -> Int32:
        """Replace a request's own pages in the page table by the prefix cache's pages for the same tokens.

        Returns the request's own pages, int32 [n], which the caller must free.
        """
        row, own = self.page_table[sequence.slot], []
        for first, pages in duplicates:
            end = first + len(pages)
            own.append(row[first:end].copy())
            row[first:end] = pages
        return np.concatenate(own)

    def prepare_free(self, sequence: SequenceState, computed: int, known: int) -> DeferredFree:
        """Detach a finishing or retracted request from its slot, and return the argument for `free`.

        Args:
            sequence: the request; it has neither slot nor pages afterwards.
            computed: number of its tokens whose KV exists once all launched steps are complete.
            known: number of its tokens whose ids are known.
        """
        size = self.page_size
        held, full = -(-computed // size), (computed if computed < known else known) // size
        if held < sequence.pages_held:
            held = sequence.pages_held
        if not self._keeps_kv:
            held = full = 0
        release = DeferredFree(sequence.slot, sequence.node, full, held)
        sequence.slot, sequence.node, sequence.pages_held = -1, None, 0
        return release

    def reclaimable_pages(self, sequence: SequenceState, computed: int) -> int:
        """Return a lower bound of the number of pages that become free or evictable if a request leaves.

        `computed` is the number of its tokens whose KV exists once all launched steps are complete.
        """
        ancestor = sequence.node
        assert ancestor is not None
        pages = max(self.pages_for(computed), sequence.pages_held) - ancestor.end
        while ancestor is not None:
            if ancestor.lock_count == 1:
                pages += len(ancestor.pages)
            ancestor = ancestor.parent
        return pages

    def free(self, release: DeferredFree) -> None:
        """Free a request's slot and pages, or only duplicate pages.

        The caller must ensure that no step in flight still uses them. A request's full pages whose token
        ids are known go to the prefix cache.
        """
        slot, node = release.slot, release.node
        if node is not None:
            self._cache_and_free(slot, node, release.cached_columns, release.held_columns)
        if release.pages is not None:
            self.pool.free(release.pages)
        if slot >= 0:
            self.slot_owners[slot] = None
            self.free_slots.append(slot)

    def deferred_pages(self, release: DeferredFree) -> Int32:
        """Return the pages of a deferred free that the prefix cache does not own already, int32 [n]."""
        if release.node is not None:
            return self.page_table[release.slot, release.node.end : release.held_columns]
        return self._column_of[:0] if release.pages is None else release.pages

    def _cache_and_free(self, slot: int, node: RadixNode, full: int, held: int) -> None:
        start, row, size = node.end, self.page_table[slot], self.page_size
        if full > start:
            data = self.tokens[slot, start * size : full * size].tobytes()
            owner = self.slot_owners[slot]
            priority = 0 if owner is None else owner.request.priority
            for pages in self.cache.insert_and_unlock(node, data, row[start:full], priority):
                self.pool.free(pages)
            start = full
        else:
            self.cache.unlock(node)
        if held > start:
            self.pool.free(row[start:held])

    def _evict(self, count: int) -> None:
        for pages in self.cache.evict(count):
            self.pool.free(pages)
