# SPDX-License-Identifier: Apache-2.0
"""A Hypothesis state machine that compares the radix tree with a dictionary from (salt, prefix) to page."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mizzen.core.kv.block_hashes import BLOCK_TOKENS, block_hashes
from mizzen.core.kv.eviction import STRATEGIES
from mizzen.core.kv.radix_cache import RadixTree
from mizzen.core.kv.radix_node import RadixNode

UNIT = 8
"""Number of prompt tokens that each drawn number stands for, so that prompts fill blocks of 64 tokens."""
Key = tuple[bytes, tuple[int, ...]]


class TreeMachine(RuleBasedStateMachine):
    """Random inserts, unlocks and evictions; `model` maps each cached prefix to its last page."""

    @initialize(page_size=st.sampled_from((1, 3, 4, 16, 128)), strategy=st.sampled_from(sorted(STRATEGIES)))
    def start(self, page_size: int, strategy: str) -> None:
        self.size = page_size
        self.tree = RadixTree(page_size, STRATEGIES[strategy])
        self.model: dict[Key, int] = {}
        self.locks: list[tuple[RadixNode, Key]] = []
        self.published_hashes: set[int] = set()
        self.next_page = 0
        self.peeks: list[tuple[bytes, int, bytes, RadixNode | None]] = []

    @invariant()
    def a_peek_continues_from_the_previous_match(self) -> None:
        for index, (data, pages, salt, last_node) in enumerate(self.peeks):
            match = self.tree.peek(data, pages, salt)
            assert self.tree.peek(data, pages, salt, last_node) == match
            path = match.path()
            assert all(below.parent is above for above, below in pairwise(path))
            assert not path or path[-1] is (match.partial_node or match.last_node)
            if index % 2:
                self.peeks[index] = (data, pages, salt, match.last_node)

    @rule(
        words=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        cut=st.integers(0, UNIT - 1),
        salt=st.sampled_from((b"", b"x")),
        keep=st.booleans(),
    )
    def insert(self, words: list[int], cut: int, salt: bytes, keep: bool) -> None:
        tokens = np.repeat(np.array(words, np.int32), UNIT)[cut:]
        pages = len(tokens) // self.size
        tokens = tokens[: pages * self.size]
        data = tokens.tobytes()
        cached_prefix = self.tree.peek(data, pages, salt)
        cached = cached_prefix.pages
        self.peeks.append((data, pages, salt, cached_prefix.last_node))
        node = self.tree.match(data, pages, salt)
        self.tree.lock(node)
        assert node.end == cached == self._cached(tokens, salt)
        row = np.full(pages, -1, np.int32)
        self.tree.fill_row(node, row)
        assert row[:cached].tolist() == [self.model[self._key(tokens, salt, i)] for i in range(cached)]
        fresh = np.arange(self.next_page, self.next_page + pages - cached, dtype=np.int32)
        self.next_page += len(fresh)
        uncached_data = data[cached * self.size * 4 :]
        if keep or not uncached_data:
            node, duplicates = self.tree.insert_locked(node, uncached_data, fresh)
            assert not duplicates
        else:
            assert not self.tree.insert_and_unlock(node, uncached_data, fresh)
        for index, page in enumerate(fresh.tolist(), start=cached):
            self.model[self._key(tokens, salt, index)] = page
        if keep:
            self.locks.append((node, (salt, tuple(tokens.tolist()))))
        elif not uncached_data:
            self.tree.unlock(node)

    @rule(
        words=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        salt=st.sampled_from((b"", b"x")),
        end=st.booleans(),
    )
    def insert_from_the_root(self, words: list[int], salt: bytes, end: bool) -> None:
        """Insert a prompt of a request that was admitted before another request cached the same prompt."""
        tokens = np.repeat(np.array(words, np.int32), UNIT)
        pages = len(tokens) // self.size
        tokens = tokens[: pages * self.size]
        root = self.tree.match(b"", 0, salt)
        self.tree.lock(root)
        own = np.arange(self.next_page, self.next_page + pages, dtype=np.int32)
        self.next_page += pages
        cached = self._cached(tokens, salt)
        if end and pages:
            back = [
                page
                for duplicate_pages in self.tree.insert_and_unlock(root, tokens.tobytes(), own)
                for page in duplicate_pages.tolist()
            ]
            assert back == own[:cached].tolist()
        else:
            node, duplicates = self.tree.insert_locked(root, tokens.tobytes(), own)
            deduplicated = [page for _, duplicate_pages in duplicates for page in duplicate_pages.tolist()]
            assert deduplicated == [self.model[self._key(tokens, salt, i)] for i in range(cached)]
            assert node.end == pages
            self.tree.unlock(node)
        for index in range(cached, pages):
            self.model[self._key(tokens, salt, index)] = int(own[index])

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node, _ = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        self.tree.unlock(node)

    @rule(count=st.integers(1, 40))
    def evict(self, count: int) -> None:
        locked = self._held()
        freed = [page for pages in self.tree.evict(count) for page in pages.tolist()]
        assert len(freed) == min(count, len(self.model) - len(locked))
        evicted = {key for key, page in self.model.items() if page in set(freed)}
        assert len(evicted) == len(freed)
        assert not evicted & locked
        for key in evicted:
            del self.model[key]
        assert all(self._parent(key) in self.model for key in self.model if len(key[1]) > self.size)

    @invariant()
    def pages_agree_with_the_model(self) -> None:
        if not hasattr(self, "tree"):
            return
        assert sorted(page for node in self.tree.nodes() for page in node.pages) == sorted(
            self.model.values()
        )
        assert self.tree.evictable == len(self.model) - len(self._held())

    @rule()
    def block_hashes_agree_with_the_model(self) -> None:
        events = self.tree.drain_events()
        assert not set(events.stored) & self.published_hashes
        assert set(events.evicted) <= self.published_hashes
        self.published_hashes = (self.published_hashes | set(events.stored)) - set(events.evicted)
        expected: set[int] = set()
        for salt, tokens in self.model:
            full = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
            expected |= set(block_hashes(np.array(tokens[:full], np.int32), salt))
        assert self.published_hashes == expected == set(self.tree.snapshot())

    def teardown(self) -> None:
        if hasattr(self, "tree"):
            self.block_hashes_agree_with_the_model()

    def _key(self, tokens: np.ndarray, salt: bytes, page: int) -> Key:
        return salt, tuple(tokens[: (page + 1) * self.size].tolist())

    def _parent(self, key: Key) -> Key:
        return key[0], key[1][: -self.size]

    def _cached(self, tokens: np.ndarray, salt: bytes) -> int:
        pages = len(tokens) // self.size
        return next((i for i in range(pages) if self._key(tokens, salt, i) not in self.model), pages)

    def _held(self) -> set[Key]:
        return {
            (salt, tokens[:end])
            for _, (salt, tokens) in self.locks
            for end in range(self.size, len(tokens) + 1, self.size)
        }


def test_radix_tree_equals_a_dictionary_model() -> None:
    run_state_machine_as_test(
        TreeMachine,
        settings=settings(
            max_examples=150,
            stateful_step_count=25,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
