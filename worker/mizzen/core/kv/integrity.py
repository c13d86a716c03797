"""Checks that no page and no slot is lost or owned twice, and that the prefix tree's counts are right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from mizzen.core.kv.radix_node import Node
from mizzen.core.request import Int32
from mizzen.core.sequence import Phase, Sequence

if TYPE_CHECKING:
    from mizzen.core.scheduler import Scheduler


def find_faults(scheduler: Scheduler) -> list[str]:
    """Return what is wrong, one sentence each."""
    return [
        *_page_faults(scheduler),
        *_slot_faults(scheduler),
        *_row_faults(scheduler),
        *_tree_faults(scheduler),
    ]


def _running(scheduler: Scheduler) -> list[Sequence]:
    return [sequence for sequence in scheduler.living() if sequence.phase is not Phase.WAITING]


def _held(scheduler: Scheduler, sequence: Sequence) -> int:
    """Return how many columns of its row a running request holds."""
    decodes = sequence.phase is Phase.DECODE
    computed = scheduler.decode.computed(sequence) if decodes else sequence.computed
    return max(scheduler.memory.columns(computed), sequence.pages_held)


def _owners(scheduler: Scheduler) -> Iterator[tuple[str, Int32]]:
    memory = scheduler.memory
    yield "the free stack", memory.pool.free_pages()
    for node in memory.cache.nodes():
        yield "the prefix tree", node.pages
    for release in scheduler.flights.releases():
        yield "a fence", memory.fenced_pages(release)
    for sequence in _running(scheduler):
        assert sequence.node is not None
        yield (
            f"request {sequence.rid}",
            memory.table[sequence.slot, sequence.node.end : _held(scheduler, sequence)],
        )


def _page_faults(scheduler: Scheduler) -> Iterator[str]:
    owners = list(_owners(scheduler))
    total = scheduler.memory.pool.total
    pages = np.concatenate([pages for _, pages in owners])
    if len(pages) and not 0 <= pages.min() <= pages.max() < total:
        yield "a page number is out of range"
        return
    counts = np.bincount(pages, minlength=total)
    if (counts == 0).any():
        yield f"pages {np.flatnonzero(counts == 0)[:8].tolist()} are lost"
    for page in np.flatnonzero(counts > 1)[:8]:
        who = [name for name, pages in owners for _ in range(int((pages == page).sum()))]
        yield f"page {page} belongs to {' and '.join(who)}"


def _slot_faults(scheduler: Scheduler) -> Iterator[str]:
    memory = scheduler.memory
    held = [sequence.slot for sequence in _running(scheduler)]
    fenced = [release.slot for release in scheduler.flights.releases() if release.slot >= 0]
    counts = Counter([*memory.free_slots, *held, *fenced])
    for slot in range(len(memory.table)):
        if counts[slot] != 1:
            yield f"slot {slot} has {counts[slot]} owners"
    for sequence in _running(scheduler):
        if memory.holders[sequence.slot] is not sequence:
            yield f"slot {sequence.slot} of request {sequence.rid} is noted as another's"


def _row_faults(scheduler: Scheduler) -> Iterator[str]:
    """Rows must show the tree's pages below a request's node, and the tree its tokens."""
    memory = scheduler.memory
    for sequence in _running(scheduler):
        node: Node | None = sequence.node
        while node is not None:
            if not np.array_equal(memory.table[sequence.slot, node.start : node.end], node.pages):
                yield f"request {sequence.rid} reads other pages than the tree's up to page {node.end}"
            size = memory.page_size
            tokens = memory.tokens[sequence.slot, node.start * size : node.end * size]
            if tokens.tobytes() != node.data:
                yield f"request {sequence.rid} is locked to the tokens of another prefix"
            node = node.parent


def _tree_faults(scheduler: Scheduler) -> Iterator[str]:
    memory = scheduler.memory
    locks: Counter[Node] = Counter()
    for sequence in _running(scheduler):
        if sequence.node is not None:
            locks[sequence.node] += 1
    for release in scheduler.flights.releases():
        if release.node is not None:
            locks[release.node] += 1
    nodes = list(memory.cache.nodes())
    free = 0
    for node in nodes:
        expected = locks.pop(node, 0) + sum(child.refs for child in node.children.values())
        if node.refs != expected:
            yield f"a node that ends at page {node.end} counts {node.refs} locks, {expected} hold it"
        if node.refs == 0:
            free += len(node.pages)
        leaf = node.parent is not None and not node.children and node.refs == 0
        if bool(node.ticket) != leaf:
            yield f"a node that ends at page {node.end} is {'not ' if leaf else ''}up for eviction"
        for key, child in node.children.items():
            if child.parent is not node or not child.data.startswith(key) or child.start != node.end:
                yield f"a child of the node that ends at page {node.end} is misplaced"
    if locks:
        yield f"{len(locks)} locked nodes are not in the tree"
    if free != memory.cache.evictable:
        yield f"{memory.cache.evictable} pages are noted as evictable, {free} are"
