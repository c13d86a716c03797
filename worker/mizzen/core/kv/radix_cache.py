"""The prefix cache: a radix tree over pages, keyed by token ids under a salt.

SGLang's RadixAttention (arXiv 2312.07104), at page granularity. An edge holds a run of whole pages; two
children of a node differ in their first page. A lock on a node holds it and all nodes above it: its `refs`
count the locks at or below it. Only unlocked leaves are evicted, from their ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mizzen.core.kv.cache_events import BlockNames
from mizzen.core.kv.eviction import EvictionHeap, Strategy
from mizzen.core.kv.radix_node import Node
from mizzen.core.outputs import CacheEvents
from mizzen.core.request import Int32

_TOKEN_BYTES = 4


class Known(NamedTuple):
    """What the tree holds of some data."""

    whole: Node | None
    """The last node that it holds whole; None where the tree has nothing under the salt."""
    part: Node | None
    """The node behind it that it holds in part."""
    pages: int

    def path(self) -> list[Node]:
        """Return the nodes that hold these pages, from the root."""
        nodes = [] if self.part is None else [self.part]
        above = self.whole
        while above is not None:
            nodes.append(above)
            above = above.parent
        nodes.reverse()
        return nodes


class Duplicate(NamedTuple):
    """Pages that the tree held already; `first` counts from the start of what was inserted."""

    first: int
    pages: Int32


class RadixTree:
    """Pages of known token prefixes. Owns the pages that it holds."""

    def __init__(self, page_size: int, strategy: Strategy) -> None:
        self.page_size = page_size
        self.evictable = 0
        """Pages that no lock holds."""
        self.additions = 0
        """How often pages came in."""
        self._page_bytes = page_size * _TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        self._heap = EvictionHeap(strategy)
        self._names = BlockNames(page_size)
        self._clock = 0

    def match(self, data: bytes, limit: int, salt: bytes, known: Node | None = None) -> Node:
        """Return the node that ends where the longest cached prefix of `data` ends, at most `limit` pages.

        Splits the last node when the prefix ends inside it. The caller locks the node before anything else.
        `known` is where an earlier look for the same data, limit and salt ended.
        """
        node, child, position = self._walk(data, limit, salt, known)
        if child is None:
            return node
        return self._split(child, self._shared_pages(child, data, position, limit * self._page_bytes))

    def look(self, data: bytes, limit: int, salt: bytes, known: Node | None = None) -> Known:
        """Return what the tree holds of `data`, as `match` finds it; changes nothing."""
        if salt not in self._roots:
            return Known(None, None, 0)
        node, child, position = self._walk(data, limit, salt, known)
        part = 0
        if child is not None:
            part = self._shared_pages(child, data, position, limit * self._page_bytes)
        return Known(node, child, node.end + part)

    def fill(self, node: Node, row: Int32, priority: int = 0) -> None:
        """Write the pages from the root to a locked node into a row of a page table, and count a hit.

        `priority` is that of the request; a node has the highest one of those that used it.
        """
        above: Node | None = node
        while above is not None:
            above.hits += 1
            if above.priority < priority:
                above.priority = priority
            end, pages = above.end, above.pages
            row[end - len(pages) : end] = pages
            above = above.parent

    def lock(self, node: Node) -> None:
        """Keep a node and those above it from eviction."""
        self._clock += 1
        above: Node | None = node
        while above is not None:
            self._hold(above)
            above = above.parent

    def unlock(self, node: Node) -> None:
        """Undo one lock."""
        self._clock += 1
        above: Node | None = node
        while above is not None:
            above.used = self._clock
            above.refs -= 1
            if not above.refs:
                self.evictable += len(above.pages)
                if not above.children:
                    self._offer_leaf(above)
            above = above.parent

    def extend(
        self, node: Node, data: bytes, pages: Int32, priority: int = 0
    ) -> tuple[Node, list[Duplicate]]:
        """Insert pages behind a node that the caller has locked, and move the lock to their end.

        The tree keeps what is new to it. What it held already comes back as duplicates: the caller keeps its
        own pages there, and may use the tree's instead.
        """
        self._clock += 1
        duplicates: list[Duplicate] = []
        position = 0
        while position < len(data):
            child = node.children.get(data[position : position + self._page_bytes])
            first = position // self._page_bytes
            if child is None:
                node = self._add(node, data[position:], pages[first:].copy(), 1, priority)
                break
            if not data.startswith(child.data, position):
                child = self._split(child, self._shared_pages(child, data, position, len(data)))
            self._hold(child)
            child.priority = max(child.priority, priority)
            duplicates.append(Duplicate(first, child.pages))
            position += len(child.data)
            node = child
        return node, duplicates

    def deposit(self, node: Node, data: bytes, pages: Int32, priority: int = 0) -> list[Int32]:
        """Insert at least a page behind a node, undo the caller's lock, and return the pages not needed."""
        if data[: self._page_bytes] in node.children:
            end, duplicates = self.extend(node, data, pages, priority)
            self.unlock(end)
            return [pages[first : first + len(held)] for first, held in duplicates]
        leaf = self._add(node, data, pages.copy(), 0, priority)
        self.evictable += len(pages)
        self.unlock(node)
        self._heap.offer(leaf)
        return []

    def evict(self, count: int) -> list[Int32]:
        """Remove up to `count` unlocked pages and return them."""
        freed: list[Int32] = []
        while count > 0:
            node = self._heap.pop()
            if node is None:
                break
            assert isinstance(node, Node)
            pages = node.pages
            if len(pages) > count:
                pages = pages[-count:]
            self._trim(node, len(pages))
            freed.append(pages)
            count -= len(pages)
        return freed

    def take_events(self) -> CacheEvents:
        """Return the blocks stored and evicted since the last call."""
        return self._names.take()

    def snapshot(self) -> tuple[int, ...]:
        """Return the names of all blocks held."""
        return self._names.snapshot()

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes, roots included."""
        rest = list(self._roots.values())
        while rest:
            node = rest.pop()
            yield node
            rest.extend(node.children.values())

    def _walk(
        self, data: bytes, limit: int, salt: bytes, known: Node | None
    ) -> tuple[Node, Node | None, int]:
        """Return the last node that matches whole, the child that matches in part, and where it starts.

        What ends at a node that was found before is still a prefix of `data` as long as the node is in the
        tree: splits leave its end where it is, and evictions only shorten it.
        """
        node = self._roots.get(salt) if known is None or known.gone else known
        if node is None:
            node = self._roots[salt] = Node(None, b"", np.empty(0, np.int32), salt)
            node.names = []
        end, page = limit * self._page_bytes, self._page_bytes
        position = node.end * page
        while position < end:
            child = node.children.get(data[position : position + page])
            if child is None:
                break
            if position + len(child.data) > end or not data.startswith(child.data, position):
                return node, child, position
            position += len(child.data)
            node = child
        return node, None, position

    def _shared_pages(self, node: Node, data: bytes, position: int, end: int) -> int:
        """Return how many whole pages of a node equal `data[position:end]`."""
        count = min(len(node.data), end - position) // _TOKEN_BYTES
        differ = np.frombuffer(node.data, np.int32, count) != np.frombuffer(data, np.int32, count, position)
        first = int(differ.argmax())
        return (first if differ[first] else count) // self.page_size

    def _add(self, parent: Node, data: bytes, pages: Int32, refs: int, priority: int) -> Node:
        """Add a leaf to a locked node."""
        node = Node(parent, data, pages)
        node.refs, node.priority = refs, priority
        node.born = node.used = self._clock
        parent.children[data[: self._page_bytes]] = node
        self.additions += 1
        self._names.added(node)
        return node

    def _split(self, node: Node, pages: int) -> Node:
        """Put the first `pages` pages of a node into a new parent of it, and return that.

        The node itself stays the end of the run, so locks that point to it stay right.
        """
        parent, border = node.parent, pages * self._page_bytes
        assert parent is not None
        upper = Node(parent, node.data[:border], node.pages[:pages])
        upper.refs, upper.born, upper.used, upper.hits = node.refs, node.born, node.used, node.hits
        upper.priority = node.priority
        parent.children[upper.data[: self._page_bytes]] = upper
        node.parent = upper
        node.data = node.data[border:]
        node.pages = node.pages[pages:]
        upper.children[node.data[: self._page_bytes]] = node
        self._names.split(upper, node)
        return upper

    def _hold(self, node: Node) -> None:
        node.used = self._clock
        if not node.refs:
            self.evictable -= len(node.pages)
            self._heap.withdraw(node)
        node.refs += 1

    def _offer_leaf(self, node: Node) -> None:
        """Let an unlocked node without children be evicted; an empty root goes at once."""
        if node.children or node.refs:
            return
        if node.parent is None:
            node.gone = True
            del self._roots[node.salt]
        else:
            self._heap.offer(node)

    def _trim(self, node: Node, pages: int) -> None:
        """Cut the last pages off an unlocked leaf; without pages left, it leaves the tree."""
        parent, keep = node.parent, len(node.pages) - pages
        assert parent is not None
        self.evictable -= pages
        if keep:
            node.data = node.data[: keep * self._page_bytes]
            node.pages = node.pages[:keep]
            node.end -= pages
            self._names.trimmed(node)
            self._heap.offer(node)
            return
        node.gone = True
        del parent.children[node.data[: self._page_bytes]]
        self._names.removed(node)
        if not parent.children and not parent.refs:
            self._offer_leaf(parent)
