# SPDX-License-Identifier: Apache-2.0
"""Integrity checks of a scheduler: every page and slot has exactly one owner, and lock counts are right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from mizzen.core.decode_batch import DecodeBatch
from mizzen.core.inflight import InflightSteps
from mizzen.core.kv.manager import KvManager
from mizzen.core.kv.radix_node import RadixNode
from mizzen.core.request import Int32
from mizzen.core.sequence import SequencePhase, SequenceState


class SchedulerState(Protocol):
    """The state of a scheduler that the checks read; `Scheduler` implements it."""

    @property
    def kv(self) -> KvManager:
        """Pages, slots and the prefix cache."""
        ...

    @property
    def decode_batch(self) -> DecodeBatch:
        """The decoding requests."""
        ...

    @property
    def inflight(self) -> InflightSteps:
        """The steps in flight."""
        ...

    def live_sequences(self) -> Iterable[SequenceState]:
        """Return all requests that wait or run."""
        ...


MAX_REPORTED_FAULTS = 16
"""Maximum number of faults kept for reporting: one defect may affect every page."""


class IntegrityMonitor:
    """Runs the integrity checks while the scheduler is idle, and keeps the faults for reporting."""

    def __init__(self) -> None:
        self.checks = 0
        """Number of times that the checks ran."""
        self.faults = 0
        """Number of faults found."""
        self.unchecked = False
        """Whether a step was launched since the last check."""
        self._unreported: tuple[str, ...] = ()

    def check(self, scheduler: SchedulerState) -> None:
        """Check a scheduler and record the faults that are found."""
        faults = find_integrity_faults(scheduler)
        self.unchecked = False
        self.checks += 1
        self.faults += len(faults)
        self._unreported = (*self._unreported, *faults)[:MAX_REPORTED_FAULTS]

    def drain(self) -> tuple[str, ...]:
        """Return up to `MAX_REPORTED_FAULTS` faults, the first ones since the last call, and clear them."""
        faults, self._unreported = self._unreported, ()
        return faults


def find_integrity_faults(scheduler: SchedulerState) -> list[str]:
    """Return a message for each integrity fault of a scheduler."""
    return [
        *_page_faults(scheduler),
        *_slot_faults(scheduler),
        *_row_faults(scheduler),
        *_tree_faults(scheduler),
    ]


def _running(scheduler: SchedulerState) -> list[SequenceState]:
    return [
        sequence for sequence in scheduler.live_sequences() if sequence.phase is not SequencePhase.WAITING
    ]


def _held(scheduler: SchedulerState, sequence: SequenceState) -> int:
    """Return the number of page-table columns that a running request holds."""
    decodes = sequence.phase is SequencePhase.DECODE
    computed = scheduler.decode_batch.computed_tokens(sequence) if decodes else sequence.computed
    return max(scheduler.kv.pages_for(computed), sequence.pages_held)


def _owners(scheduler: SchedulerState) -> Iterator[tuple[str, Int32]]:
    memory = scheduler.kv
    yield "the free pool", memory.pool.free_pages()
    for node in memory.cache.nodes():
        yield "the prefix cache", node.pages
    for release in scheduler.inflight.deferred_frees():
        yield "a deferred free", memory.deferred_pages(release)
    for sequence in _running(scheduler):
        assert sequence.node is not None
        yield (
            f"request {sequence.rid}",
            memory.page_table[sequence.slot, sequence.node.end : _held(scheduler, sequence)],
        )


def _page_faults(scheduler: SchedulerState) -> Iterator[str]:
    owners = list(_owners(scheduler))
    total = scheduler.kv.pool.total
    pages = np.concatenate([pages for _, pages in owners])
    if len(pages) and not 0 <= pages.min() <= pages.max() < total:
        yield "a page number is out of range"
        return
    counts = np.bincount(pages, minlength=total)
    if (counts == 0).any():
        yield f"pages {np.flatnonzero(counts == 0)[:8].tolist()} are leaked"
    for page in np.flatnonzero(counts > 1)[:8]:
        names = [name for name, pages in owners for _ in range(int((pages == page).sum()))]
        yield f"page {page} belongs to {' and '.join(names)}"


def _slot_faults(scheduler: SchedulerState) -> Iterator[str]:
    memory = scheduler.kv
    held = [sequence.slot for sequence in _running(scheduler)]
    fenced = [release.slot for release in scheduler.inflight.deferred_frees() if release.slot >= 0]
    counts = Counter([*memory.free_slots, *held, *fenced])
    for slot in range(len(memory.page_table)):
        if counts[slot] != 1:
            yield f"slot {slot} has {counts[slot]} owners"
    for sequence in _running(scheduler):
        if memory.slot_owners[sequence.slot] is not sequence:
            yield f"slot {sequence.slot} of request {sequence.rid} is recorded as another request's"


def _row_faults(scheduler: SchedulerState) -> Iterator[str]:
    """Yield the faults of running requests whose pages or tokens differ from those of their cached prefix.

    For each node from the root to the request's locked node, the request's page-table row must hold the
    node's pages, and the request's tokens must equal the node's tokens.
    """
    memory = scheduler.kv
    for sequence in _running(scheduler):
        node: RadixNode | None = sequence.node
        while node is not None:
            if not np.array_equal(memory.page_table[sequence.slot, node.start : node.end], node.pages):
                yield f"request {sequence.rid} has other pages than the prefix cache, up to page {node.end}"
            size = memory.page_size
            tokens = memory.tokens[sequence.slot, node.start * size : node.end * size]
            if tokens.tobytes() != node.token_bytes:
                yield f"request {sequence.rid} is locked to the tokens of another prefix"
            node = node.parent


def _tree_faults(scheduler: SchedulerState) -> Iterator[str]:
    memory = scheduler.kv
    locks: Counter[RadixNode] = Counter()
    for sequence in _running(scheduler):
        if sequence.node is not None:
            locks[sequence.node] += 1
    for release in scheduler.inflight.deferred_frees():
        if release.node is not None:
            locks[release.node] += 1
    nodes = list(memory.cache.nodes())
    free = 0
    for node in nodes:
        expected = locks.pop(node, 0) + sum(child.lock_count for child in node.children.values())
        if node.lock_count != expected:
            yield f"a node that ends at page {node.end} counts {node.lock_count} locks instead of {expected}"
        if node.lock_count == 0:
            free += len(node.pages)
        leaf = node.parent is not None and not node.children and node.lock_count == 0
        if bool(node.heap_entry) != leaf:
            yield f"a node that ends at page {node.end} is {'not ' if leaf else ''}evictable"
        for key, child in node.children.items():
            if child.parent is not node or not child.token_bytes.startswith(key) or child.start != node.end:
                yield f"a child of the node that ends at page {node.end} is misplaced"
    if locks:
        yield f"{len(locks)} locked nodes are not in the radix tree"
    if free != memory.cache.evictable:
        yield f"{memory.cache.evictable} pages are recorded as evictable, but {free} are"
