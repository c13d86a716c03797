# SPDX-License-Identifier: Apache-2.0
"""Unit tests of small parts of the scheduler: page pool, stop table and eviction order."""

from __future__ import annotations

import numpy as np
import pytest

from mizzen.core.kv.eviction import STRATEGIES, EvictionHeap
from mizzen.core.kv.page_pool import PagePool
from mizzen.core.stop_tokens import StopTable


def test_page_pool_allocates_and_frees_pages() -> None:
    pool = PagePool(4)
    pages = pool.allocate(3)
    assert sorted(pages.tolist()) == [0, 1, 2]
    pool.free(pages[:2])
    assert pool.free_count == 3
    with pytest.raises(RuntimeError, match="4 pages requested, 3 are free"):
        pool.allocate(4)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free(pages)


def candidates(table: StopTable, tokens: np.ndarray, set_ids: np.ndarray) -> list[int]:
    return table.candidates(tokens, np.arange(len(tokens)), set_ids)


def test_stop_table_finds_each_set() -> None:
    table = StopTable()
    sets = [frozenset({number, 1000 + number}) for number in range(20)]
    set_ids = np.array([table.add(tokens_of_set) for tokens_of_set in sets], np.uint8)
    assert table.add(sets[0]) == set_ids[0]
    for number in range(20):
        tokens = np.full(20, number, np.int32)
        assert number in candidates(table, tokens, set_ids)
        assert len(candidates(table, tokens, set_ids)) <= 3
    table.remove(sets[0])
    assert 0 in candidates(table, np.zeros(20, np.int32), set_ids)
    assert table.add(frozenset()) == 0


def test_stop_table_removes_unused_sets() -> None:
    table = StopTable()
    used_set = frozenset({5})
    set_ids = np.array([table.add(used_set)] * 2000, np.uint8)
    for number in range(1000, 3000):
        table.add(frozenset({number}))
        table.remove(frozenset({number}))
    remaining = candidates(table, np.arange(1000, 3000, dtype=np.int32), set_ids)
    assert len(remaining) < 100
    assert len(candidates(table, np.full(2000, 5, np.int32), set_ids)) == 2000


def test_stop_tokens_larger_than_the_table_share_entries() -> None:
    table = StopTable()
    set_ids = np.array([table.add(frozenset({2**31 - 1}))], np.uint8)
    assert len(candidates(table, np.array([2**31 - 1], np.int32), set_ids)) == 1


class Leaf:
    def __init__(self, used: int, hits: int, created: int = 0, priority: int = 0) -> None:
        self.used, self.hits, self.created, self.priority, self.heap_entry = used, hits, created, priority, 0


def test_each_eviction_policy_orders_nodes() -> None:
    old_busy, new_idle = Leaf(used=3, hits=9, created=2, priority=2), Leaf(used=5, hits=1, created=1)
    expected = {"lru": old_busy, "lfu": new_idle, "fifo": new_idle, "mru": new_idle, "slru": new_idle}
    expected["priority"] = new_idle
    assert set(expected) == set(STRATEGIES)
    for name, first in expected.items():
        heap = EvictionHeap(STRATEGIES[name])
        heap.offer(old_busy)
        heap.offer(new_idle)
        assert heap.pop() is first
        heap.withdraw(old_busy)
        heap.withdraw(new_idle)
        assert heap.pop() is None


def test_slru_segments_keep_the_order_of_use() -> None:
    used_once, used_twice, used_often = Leaf(used=9, hits=1), Leaf(used=1, hits=2), Leaf(used=2, hits=7)
    heap = EvictionHeap(STRATEGIES["slru"])
    for leaf in (used_often, used_twice, used_once):
        heap.offer(leaf)
    assert [heap.pop() for _ in range(3)] == [used_once, used_twice, used_often]


def test_eviction_heap_stays_small_under_reuse() -> None:
    heap = EvictionHeap(STRATEGIES["lru"])
    leaf = Leaf(used=0, hits=0)
    for number in range(5000):
        heap.withdraw(leaf)
        leaf.used = number
        heap.offer(leaf)
    assert len(heap) == 1
    assert len(heap._entries) < 300
