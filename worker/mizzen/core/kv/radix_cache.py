# SPDX-License-Identifier: Apache-2.0
"""The prefix cache: a radix tree over pages, keyed by token ids, with a separate root for each salt.

It follows SGLang's RadixAttention (arXiv 2312.07104), at page granularity. A node holds a run of full pages,
and the children of a node differ in the tokens of their first page. A lock on a node also locks its
ancestors: `lock_count` is the number of locks on the node and its descendants. Only unlocked leaves are
evicted, page by page from their end. Token ids are passed as bytes (native int32).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mizzen.core.kv.cache_events import BlockHashLedger
from mizzen.core.kv.eviction import EvictionHeap, Strategy
from mizzen.core.kv.radix_node import RadixNode
from mizzen.core.outputs import CacheEvents
from mizzen.core.request import Int32

_TOKEN_BYTES = 4


class CachedPrefix(NamedTuple):
    """The longest cached prefix of a token sequence."""

    last_node: RadixNode | None
    """Last node whose tokens all match; None if the tree has no root for the salt."""
    partial_node: RadixNode | None
    """Child of `last_node` that matches in part: its first pages match, but its last ones do not. None if
    there is no such child."""
    pages: int
    """Number of cached pages."""

    def path(self) -> list[RadixNode]:
        """Return the nodes that hold the cached pages, from the root."""
        nodes = [] if self.partial_node is None else [self.partial_node]
        ancestor = self.last_node
        while ancestor is not None:
            nodes.append(ancestor)
            ancestor = ancestor.parent
        nodes.reverse()
        return nodes


class DuplicatePages(NamedTuple):
    """Pages that the tree already held for tokens that a caller inserted."""

    first: int
    """Index of the first of these pages among the inserted pages."""
    pages: Int32
    """The tree's pages, int32 [n]."""


class RadixTree:
    """A radix tree that owns the cached pages."""

    def __init__(self, page_size: int, strategy: Strategy) -> None:
        self.page_size = page_size
        self.evictable = 0
        """Number of pages in unlocked nodes."""
        self.additions = 0
        """Number of nodes added so far; serves as a version number of the tree's contents."""
        self._page_bytes = page_size * _TOKEN_BYTES
        self._roots: dict[bytes, RadixNode] = {}
        self._heap = EvictionHeap(strategy)
        self._block_ledger = BlockHashLedger(page_size)
        self._clock = 0

    def match(self, data: bytes, limit: int, salt: bytes, known: RadixNode | None = None) -> RadixNode:
        """Return the last node of the longest cached prefix of a token sequence.

        If the prefix ends inside a node, the node is split. The caller must lock the returned node before it
        calls another method.

        Args:
            data: token ids as bytes.
            limit: maximum length of the prefix, in pages.
            salt: cache salt of the request.
            known: node at which an earlier lookup with the same data, limit and salt ended.
        """
        node, child, position = self._walk(data, limit, salt, known)
        if child is None:
            return node
        return self._split(child, self._shared_pages(child, data, position, limit * self._page_bytes))

    def peek(self, data: bytes, limit: int, salt: bytes, known: RadixNode | None = None) -> CachedPrefix:
        """Return the longest cached prefix of a token sequence; unlike `match`, never split a node."""
        if salt not in self._roots:
            return CachedPrefix(None, None, 0)
        node, child, position = self._walk(data, limit, salt, known)
        part = 0
        if child is not None:
            part = self._shared_pages(child, data, position, limit * self._page_bytes)
        return CachedPrefix(node, child, node.end + part)

    def fill_row(self, node: RadixNode, row: Int32, priority: int = 0) -> None:
        """Write the pages from the root to a locked node into a page-table row, int32 [columns].

        Also counts a hit for each node on the path, and raises the node's priority to at least `priority`,
        the priority of the request.
        """
        ancestor: RadixNode | None = node
        while ancestor is not None:
            ancestor.hits += 1
            if ancestor.priority < priority:
                ancestor.priority = priority
            end, pages = ancestor.end, ancestor.pages
            row[end - len(pages) : end] = pages
            ancestor = ancestor.parent

    def lock(self, node: RadixNode) -> None:
        """Lock a node and its ancestors against eviction."""
        self._clock += 1
        ancestor: RadixNode | None = node
        while ancestor is not None:
            self._lock_node(ancestor)
            ancestor = ancestor.parent

    def unlock(self, node: RadixNode) -> None:
        """Release one lock of a node and its ancestors; unlocked leaves become evictable."""
        self._clock += 1
        ancestor: RadixNode | None = node
        while ancestor is not None:
            ancestor.used = self._clock
            ancestor.lock_count -= 1
            if not ancestor.lock_count:
                self.evictable += len(ancestor.pages)
                if not ancestor.children:
                    self._offer_leaf(ancestor)
            ancestor = ancestor.parent

    def insert_locked(
        self, node: RadixNode, data: bytes, pages: Int32, priority: int = 0
    ) -> tuple[RadixNode, list[DuplicatePages]]:
        """Insert pages below a node that the caller has locked, and move the lock to the last inserted page.

        If the tree already holds pages for some of the tokens, it keeps its own pages and returns them as
        duplicates, and the caller still owns the pages that it passed for these tokens. All other inserted
        pages now belong to the tree.

        Args:
            node: the locked node.
            data: token ids of the pages, as bytes.
            pages: page numbers, int32 [n].
            priority: priority of the request.

        Returns:
            The node that is now locked, and the duplicates.
        """
        self._clock += 1
        duplicates: list[DuplicatePages] = []
        position = 0
        while position < len(data):
            child = node.children.get(data[position : position + self._page_bytes])
            first = position // self._page_bytes
            if child is None:
                node = self._add(node, data[position:], pages[first:].copy(), 1, priority)
                break
            if not data.startswith(child.token_bytes, position):
                child = self._split(child, self._shared_pages(child, data, position, len(data)))
            self._lock_node(child)
            child.priority = max(child.priority, priority)
            duplicates.append(DuplicatePages(first, child.pages))
            position += len(child.token_bytes)
            node = child
        return node, duplicates

    def insert_and_unlock(self, node: RadixNode, data: bytes, pages: Int32, priority: int = 0) -> list[Int32]:
        """Insert at least one page below a locked node, and release the lock.

        If the tree already holds pages for some of the tokens, it does not take the caller's pages for them.
        These pages are returned, and the caller must free them. Takes the same arguments as `insert_locked`.
        """
        if data[: self._page_bytes] in node.children:
            end, duplicates = self.insert_locked(node, data, pages, priority)
            self.unlock(end)
            return [pages[first : first + len(held)] for first, held in duplicates]
        leaf = self._add(node, data, pages.copy(), 0, priority)
        self.evictable += len(pages)
        self.unlock(node)
        self._heap.offer(leaf)
        return []

    def evict(self, count: int) -> list[Int32]:
        """Evict up to `count` unlocked pages, and return their numbers as int32 arrays."""
        freed: list[Int32] = []
        while count > 0:
            node = self._heap.pop()
            if node is None:
                break
            assert isinstance(node, RadixNode)
            pages = node.pages
            if len(pages) > count:
                pages = pages[-count:]
            self._trim(node, len(pages))
            freed.append(pages)
            count -= len(pages)
        return freed

    def drain_events(self) -> CacheEvents:
        """Return the blocks stored and evicted since the last call."""
        return self._block_ledger.drain()

    def snapshot(self) -> tuple[int, ...]:
        """Return the hashes of all cached blocks."""
        return self._block_ledger.snapshot()

    def nodes(self) -> Iterator[RadixNode]:
        """Yield all nodes, roots included."""
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def _walk(
        self, data: bytes, limit: int, salt: bytes, known: RadixNode | None
    ) -> tuple[RadixNode, RadixNode | None, int]:
        """Find the longest cached prefix of `data`.

        Returns the last node whose tokens all match, its child that matches in part (or None), and the byte
        offset in `data` at which that child starts. The walk starts at `known` if `known` is still in the
        tree. The tokens from the root to the end of `known` still match `data`, because a split does not
        change them, and eviction only removes pages from the end of a node.
        """
        node = self._roots.get(salt) if known is None or known.removed else known
        if node is None:
            node = self._roots[salt] = RadixNode(None, b"", np.empty(0, np.int32), salt)
            node.block_hashes = []
        end, page = limit * self._page_bytes, self._page_bytes
        position = node.end * page
        while position < end:
            child = node.children.get(data[position : position + page])
            if child is None:
                break
            if position + len(child.token_bytes) > end or not data.startswith(child.token_bytes, position):
                return node, child, position
            position += len(child.token_bytes)
            node = child
        return node, None, position

    def _shared_pages(self, node: RadixNode, data: bytes, position: int, end: int) -> int:
        """Return the number of leading pages of a node whose tokens equal those in `data[position:end]`."""
        count = min(len(node.token_bytes), end - position) // _TOKEN_BYTES
        differ = np.frombuffer(node.token_bytes, np.int32, count) != np.frombuffer(
            data, np.int32, count, position
        )
        first = int(differ.argmax())
        return (first if differ[first] else count) // self.page_size

    def _add(self, parent: RadixNode, data: bytes, pages: Int32, refs: int, priority: int) -> RadixNode:
        """Add a leaf below a locked node; the leaf starts with `refs` locks."""
        node = RadixNode(parent, data, pages)
        node.lock_count, node.priority = refs, priority
        node.created = node.used = self._clock
        parent.children[data[: self._page_bytes]] = node
        self.additions += 1
        self._block_ledger.added(node)
        return node

    def _split(self, node: RadixNode, pages: int) -> RadixNode:
        """Move the first `pages` pages of a node into a new parent, and return the parent.

        The node keeps its last pages, so requests that have locked it need not be updated.
        """
        parent, border = node.parent, pages * self._page_bytes
        assert parent is not None
        upper = RadixNode(parent, node.token_bytes[:border], node.pages[:pages])
        upper.lock_count, upper.created, upper.used, upper.hits = (
            node.lock_count,
            node.created,
            node.used,
            node.hits,
        )
        upper.priority = node.priority
        parent.children[upper.token_bytes[: self._page_bytes]] = upper
        node.parent = upper
        node.token_bytes = node.token_bytes[border:]
        node.pages = node.pages[pages:]
        upper.children[node.token_bytes[: self._page_bytes]] = node
        self._block_ledger.split(upper, node)
        return upper

    def _lock_node(self, node: RadixNode) -> None:
        node.used = self._clock
        if not node.lock_count:
            self.evictable -= len(node.pages)
            self._heap.withdraw(node)
        node.lock_count += 1

    def _offer_leaf(self, node: RadixNode) -> None:
        """Make an unlocked node without children evictable; if it is a root, remove it at once."""
        if node.children or node.lock_count:
            return
        if node.parent is None:
            node.removed = True
            del self._roots[node.salt]
        else:
            self._heap.offer(node)

    def _trim(self, node: RadixNode, pages: int) -> None:
        """Remove the last `pages` pages of an unlocked leaf; remove the leaf if it has no page left."""
        parent, keep = node.parent, len(node.pages) - pages
        assert parent is not None
        self.evictable -= pages
        if keep:
            node.token_bytes = node.token_bytes[: keep * self._page_bytes]
            node.pages = node.pages[:keep]
            node.end -= pages
            self._block_ledger.trimmed(node)
            self._heap.offer(node)
            return
        node.removed = True
        del parent.children[node.token_bytes[: self._page_bytes]]
        self._block_ledger.removed(node)
        if not parent.children and not parent.lock_count:
            self._offer_leaf(parent)
