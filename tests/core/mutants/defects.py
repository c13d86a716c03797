"""Schedulers with one seeded defect each, as small changes of the production classes."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
from msgspec.structs import replace as replace_fields

from mizzen.core.config import SchedulerConfig
from mizzen.core.decode_batch import DecodeBatch
from mizzen.core.inflight import Release
from mizzen.core.kv.manager import KvMemory
from mizzen.core.kv.radix_cache import Duplicate, RadixTree
from mizzen.core.kv.radix_node import Node
from mizzen.core.request import Int32
from mizzen.core.scheduler import Scheduler
from mizzen.core.sequence import Sequence

MUTANTS: dict[str, Callable[[SchedulerConfig], Scheduler]] = {}


def replace(part: Callable[[Scheduler], Any], name: str) -> Callable[[Callable[..., Any]], None]:
    """Register a mutant whose `part` has another method `name`; it is given the original."""

    def register(defect: Callable[..., Any]) -> None:
        def make(config: SchedulerConfig) -> Scheduler:
            scheduler = Scheduler(config)
            target = part(scheduler)
            original = getattr(target, name, None)
            if original is not None:
                setattr(target, name, lambda *values: defect(target, original, *values))
            return scheduler

        MUTANTS[defect.__name__] = make

    return register


def memory(scheduler: Scheduler) -> KvMemory:
    return scheduler.memory


def rest_of(kv: KvMemory, what: Release) -> Int32:
    """Return the pages that a release gives back for certain."""
    if what.node is None:
        return kv.fenced_pages(what)
    return kv.table[what.slot, max(what.node.end, what.full) : what.held]


def cache(scheduler: Scheduler) -> Any:
    return scheduler.memory.cache


@replace(cache, "unlock")
def skipped_unlock(tree: RadixTree, unlock: Callable[..., Any], node: Node) -> None:
    if node.end % 3:
        unlock(node)


@replace(cache, "unlock")
def unlock_of_the_last_node_only(tree: RadixTree, unlock: Callable[..., Any], node: Node) -> None:
    parent, node.parent = node.parent, None
    try:
        tree_size = tree.evictable
        node.refs -= 1
        if node.refs == 0:
            tree.evictable = tree_size + len(node.pages)
    finally:
        node.parent = parent


@replace(lambda scheduler: scheduler.flights, "fence")
def lost_fence(flights: Any, fence: Callable[..., Any], release: Release, last_step: int) -> bool:
    return False


@replace(lambda scheduler: scheduler.flights, "fence")
def fence_a_step_early(flights: Any, fence: Callable[..., Any], release: Release, last_step: int) -> bool:
    return fence(release, last_step - 1)


@replace(lambda scheduler: scheduler, "_release")
def pages_free_before_their_fence(
    scheduler: Scheduler, release: Callable[..., Any], what: Release, last_step: int
) -> None:
    if what.node is None:
        scheduler.memory.release(what)
        return
    scheduler.memory.pool.give(rest_of(scheduler.memory, what))
    release(replace_fields(what, held=0), last_step)


@replace(lambda scheduler: scheduler, "_release")
def prefix_unlocked_before_its_fence(
    scheduler: Scheduler, release: Callable[..., Any], what: Release, last_step: int
) -> None:
    if what.node is not None:
        scheduler.memory.cache.unlock(what.node)
        what = Release(slot=what.slot, pages=scheduler.memory.fenced_pages(what).copy())
    release(what, last_step)


@replace(lambda scheduler: scheduler.flights, "drop")
def surplus_tokens_kept(flights: Any, drop: Callable[..., Any], cell: int, first: int, last: int) -> int:
    return max(last + 1 - max(first, flights.completed + 1), 0)


@replace(memory, "release")
def page_freed_twice(kv: KvMemory, release: Callable[..., Any], what: Release) -> None:
    rest = rest_of(kv, what).copy()
    release(what)
    if len(rest) > 1:
        kv.pool.give(rest[:1])


@replace(memory, "release")
def page_lost(kv: KvMemory, release: Callable[..., Any], what: Release) -> None:
    release(replace_fields(what, held=what.held - 1) if len(rest_of(kv, what)) else what)


@replace(memory, "release")
def slot_lost(kv: KvMemory, release: Callable[..., Any], what: Release) -> None:
    release(what)
    if what.held % 5 == 2:
        kv.free_slots.pop()


@replace(cache, "deposit")
def duplicates_lost_at_the_end(
    tree: RadixTree, deposit: Callable[..., Any], node: Node, data: bytes, pages: Int32
) -> list[Int32]:
    deposit(node, data, pages)
    return []


@replace(cache, "deposit")
def lock_kept_at_the_end(
    tree: RadixTree, deposit: Callable[..., Any], node: Node, data: bytes, pages: Int32
) -> list[Int32]:
    tree.lock(node)
    return deposit(node, data, pages)


@replace(memory, "_retire")
def unwritten_page_cached_at_the_end(
    kv: KvMemory, retire: Callable[..., Any], slot: int, node: Node, full: int, held: int
) -> None:
    retire(slot, node, max(full, held) if held <= kv.tokens.shape[1] // kv.page_size else full, held)


@replace(memory, "adopt")
def duplicates_not_adopted(
    kv: KvMemory, adopt: Callable[..., Any], sequence: Sequence, duplicates: list[Duplicate]
) -> Int32:
    return np.concatenate([pages for _, pages in duplicates]) if duplicates else np.empty(0, np.int32)


@replace(memory, "publish")
def unwritten_page_published(
    kv: KvMemory, publish: Callable[..., Any], sequence: Sequence, tokens: int
) -> list[Duplicate]:
    held = kv.columns(tokens) * kv.page_size
    return publish(sequence, min(held, kv.tokens.shape[1]))


@replace(memory, "matchable")
def whole_prompt_from_the_cache(kv: KvMemory, matchable: Callable[..., Any], sequence: Sequence) -> int:
    return len(sequence.tokens) // kv.page_size


@replace(cache, "_split")
def stale_lock_on_split(tree: RadixTree, split: Callable[..., Any], node: Node, pages: int) -> Node:
    upper = split(node, pages)
    upper.refs = 0
    return upper


@replace(cache, "_shared_pages")
def split_a_page_late(
    tree: RadixTree, shared: Callable[..., Any], node: Node, data: bytes, position: int, end: int
) -> int:
    return min(shared(node, data, position, end) + 1, len(node.pages))


@replace(cache, "_trim")
def locked_leaf_evicted(tree: RadixTree, trim: Callable[..., Any], node: Node, pages: int) -> None:
    trim(node, pages)
    parent = node.parent
    if parent is not None and parent.parent is not None and not parent.children:
        tree._heap.offer(parent)


@replace(cache, "_walk")
def salt_ignored(
    tree: RadixTree, walk: Callable[..., Any], data: bytes, limit: int, salt: bytes
) -> tuple[Node, Node | None, int]:
    return walk(data, limit, b"")


@replace(memory, "matchable")
def whole_prompts_come_from_the_cache(kv: KvMemory, matchable: Callable[..., int], sequence: Sequence) -> int:
    return (len(sequence.tokens) - 1) // kv.page_size


@replace(lambda scheduler: scheduler.decode, "advance")
def limit_seen_late(batch: DecodeBatch, advance: Callable[..., Any], step: int) -> list[Sequence]:
    batch.next_leave = max(batch.next_leave, step + 1 if step % 2 else step)
    return advance(step)


@replace(lambda scheduler: scheduler.decode, "frame")
def version_not_honest(batch: DecodeBatch, frame: Callable[..., Any]) -> Any:
    made = frame()
    made.version = 0
    return made


def _retract_forgets_output(self: Scheduler, sequence: Sequence) -> None:
    Scheduler._retract(self, sequence)
    if len(sequence.tokens) > sequence.prompt_tokens + 1:
        self.admission.queue.tokens -= 1
        sequence.tokens = sequence.tokens[:-1]


def retraction_forgets_a_token(config: SchedulerConfig) -> Scheduler:
    scheduler = Scheduler(config)
    scheduler._retract = MethodType(_retract_forgets_output, scheduler)  # type: ignore[method-assign]
    return scheduler


MUTANTS["retraction_forgets_a_token"] = retraction_forgets_a_token
