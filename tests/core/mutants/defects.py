# SPDX-License-Identifier: Apache-2.0
"""Mutants: production schedulers, each with one seeded defect in one of its methods."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
from msgspec.structs import replace as replace_fields

from mizzen.core.config import SchedulerConfig
from mizzen.core.decode_batch import DecodeBatch
from mizzen.core.inflight import DeferredFree
from mizzen.core.kv.manager import KvManager
from mizzen.core.kv.radix_cache import DuplicatePages, RadixTree
from mizzen.core.kv.radix_node import RadixNode
from mizzen.core.request import Int32
from mizzen.core.scheduler import Scheduler
from mizzen.core.sequence import SequenceState

MUTANTS: dict[str, Callable[[SchedulerConfig], Scheduler]] = {}


def replace(target_of: Callable[[Scheduler], Any], name: str) -> Callable[[Callable[..., Any]], None]:
    """Register a mutant: a scheduler in which the decorated function replaces a method.

    At each call, the function gets the object on which the method was called, the original method bound to
    that object, and the arguments of the call.

    Args:
        target_of: returns the object whose method is replaced: the given scheduler, or a part of it.
        name: name of the method.
    """

    def register(defect: Callable[..., Any]) -> None:
        def make(config: SchedulerConfig) -> Scheduler:
            scheduler = Scheduler(config)
            target = target_of(scheduler)
            original = getattr(target, name, None)
            if original is not None:
                setattr(target, name, lambda *values: defect(target, original, *values))
            return scheduler

        MUTANTS[defect.__name__] = make

    return register


def kv_manager(scheduler: Scheduler) -> KvManager:
    return scheduler.kv


def freed_pages(kv: KvManager, deferred: DeferredFree) -> Int32:
    """Return the pages that a deferred free gives back to the pool directly, not through the radix tree."""
    if deferred.node is None:
        return kv.deferred_pages(deferred)
    return kv.page_table[
        deferred.slot, max(deferred.node.end, deferred.cached_columns) : deferred.held_columns
    ]


def cache(scheduler: Scheduler) -> Any:
    return scheduler.kv.cache


@replace(cache, "unlock")
def skipped_unlock(tree: RadixTree, unlock: Callable[..., Any], node: RadixNode) -> None:
    if node.end % 3:
        unlock(node)


@replace(cache, "unlock")
def unlock_of_the_last_node_only(tree: RadixTree, unlock: Callable[..., Any], node: RadixNode) -> None:
    parent, node.parent = node.parent, None
    try:
        tree_size = tree.evictable
        node.lock_count -= 1
        if node.lock_count == 0:
            tree.evictable = tree_size + len(node.pages)
    finally:
        node.parent = parent


@replace(lambda scheduler: scheduler.inflight, "defer")
def deferred_free_lost(
    inflight: Any, defer: Callable[..., Any], deferred: DeferredFree, last_step: int
) -> bool:
    return False


@replace(lambda scheduler: scheduler.inflight, "defer")
def freed_one_step_early(
    inflight: Any, defer: Callable[..., Any], deferred: DeferredFree, last_step: int
) -> bool:
    return defer(deferred, last_step - 1)


@replace(lambda scheduler: scheduler, "_free_or_defer")
def pages_freed_while_in_use(
    scheduler: Scheduler, free: Callable[..., Any], deferred: DeferredFree, last_step: int
) -> None:
    if deferred.node is None:
        scheduler.kv.free(deferred)
        return
    scheduler.kv.pool.free(freed_pages(scheduler.kv, deferred))
    free(replace_fields(deferred, held_columns=0), last_step)


@replace(lambda scheduler: scheduler, "_free_or_defer")
def prefix_unlocked_while_in_use(
    scheduler: Scheduler, free: Callable[..., Any], deferred: DeferredFree, last_step: int
) -> None:
    if deferred.node is not None:
        scheduler.kv.cache.unlock(deferred.node)
        deferred = DeferredFree(slot=deferred.slot, pages=scheduler.kv.deferred_pages(deferred).copy())
    free(deferred, last_step)


@replace(lambda scheduler: scheduler.inflight, "discard_tokens")
def surplus_tokens_kept(inflight: Any, discard: Callable[..., Any], slot: int, first: int, last: int) -> int:
    return max(last + 1 - max(first, inflight.completed + 1), 0)


@replace(kv_manager, "free")
def page_freed_twice(kv: KvManager, free: Callable[..., Any], deferred: DeferredFree) -> None:
    freed = freed_pages(kv, deferred).copy()
    free(deferred)
    if len(freed) > 1:
        kv.pool.free(freed[:1])


@replace(kv_manager, "free")
def page_lost(kv: KvManager, free: Callable[..., Any], deferred: DeferredFree) -> None:
    free(
        replace_fields(deferred, held_columns=deferred.held_columns - 1)
        if len(freed_pages(kv, deferred))
        else deferred
    )


@replace(kv_manager, "free")
def slot_lost(kv: KvManager, free: Callable[..., Any], deferred: DeferredFree) -> None:
    free(deferred)
    if deferred.held_columns % 5 == 2:
        kv.free_slots.pop()


@replace(cache, "insert_and_unlock")
def duplicates_lost_at_the_end(
    tree: RadixTree, insert: Callable[..., Any], node: RadixNode, data: bytes, pages: Int32, priority: int
) -> list[Int32]:
    insert(node, data, pages, priority)
    return []


@replace(cache, "insert_and_unlock")
def lock_kept_at_the_end(
    tree: RadixTree, insert: Callable[..., Any], node: RadixNode, data: bytes, pages: Int32, priority: int
) -> list[Int32]:
    tree.lock(node)
    return insert(node, data, pages, priority)


@replace(kv_manager, "_cache_and_free")
def unwritten_page_cached_at_the_end(
    kv: KvManager,
    cache_and_free: Callable[..., Any],
    slot: int,
    node: RadixNode,
    full: int,
    held_columns: int,
) -> None:
    cache_and_free(
        slot,
        node,
        max(full, held_columns) if held_columns <= kv.tokens.shape[1] // kv.page_size else full,
        held_columns,
    )


@replace(kv_manager, "dedupe")
def duplicates_not_deduped(
    kv: KvManager, dedupe: Callable[..., Any], sequence: SequenceState, duplicates: list[DuplicatePages]
) -> Int32:
    return np.concatenate([pages for _, pages in duplicates]) if duplicates else np.empty(0, np.int32)


@replace(kv_manager, "cache_prefix")
def unwritten_page_cached(
    kv: KvManager, cache_prefix: Callable[..., Any], sequence: SequenceState, tokens: int
) -> list[DuplicatePages]:
    padded_tokens = kv.pages_for(tokens) * kv.page_size
    return cache_prefix(sequence, min(padded_tokens, kv.tokens.shape[1]))


@replace(kv_manager, "matchable_pages")
def whole_prompt_from_the_cache(kv: KvManager, matchable: Callable[..., Any], sequence: SequenceState) -> int:
    return len(sequence.tokens) // kv.page_size


@replace(cache, "_split")
def stale_lock_on_split(tree: RadixTree, split: Callable[..., Any], node: RadixNode, pages: int) -> RadixNode:
    upper = split(node, pages)
    upper.lock_count = 0
    return upper


@replace(cache, "_shared_pages")
def split_a_page_late(
    tree: RadixTree, shared: Callable[..., Any], node: RadixNode, data: bytes, position: int, end: int
) -> int:
    return min(shared(node, data, position, end) + 1, len(node.pages))


@replace(cache, "_trim")
def locked_leaf_evicted(tree: RadixTree, trim: Callable[..., Any], node: RadixNode, pages: int) -> None:
    trim(node, pages)
    parent = node.parent
    if parent is not None and parent.parent is not None and not parent.children:
        tree._heap.offer(parent)


@replace(cache, "_walk")
def salt_ignored(
    tree: RadixTree,
    walk: Callable[..., Any],
    data: bytes,
    limit: int,
    salt: bytes,
    start_node: RadixNode | None,
) -> tuple[RadixNode, RadixNode | None, int]:
    return walk(data, limit, b"", start_node)


@replace(kv_manager, "matchable_pages")
def whole_prompts_come_from_the_cache(
    kv: KvManager, matchable: Callable[..., int], sequence: SequenceState
) -> int:
    return (len(sequence.tokens) - 1) // kv.page_size


@replace(lambda scheduler: scheduler.decode_batch, "advance")
def limit_seen_late(batch: DecodeBatch, advance: Callable[..., Any], step: int) -> list[SequenceState]:
    batch.next_finish = max(batch.next_finish, step + 1 if step % 2 else step)
    return advance(step)


@replace(lambda scheduler: scheduler.decode_batch, "frame")
def version_not_incremented(batch: DecodeBatch, frame: Callable[..., Any]) -> Any:
    decode_frame = frame()
    decode_frame.version = 0
    return decode_frame


def _retract_forgets_output(self: Scheduler, sequence: SequenceState) -> None:
    Scheduler._retract(self, sequence)
    if len(sequence.tokens) > sequence.prompt_tokens + 1:
        self.admission.queue.tokens -= 1
        sequence.tokens = sequence.tokens[:-1]


def retraction_forgets_a_token(config: SchedulerConfig) -> Scheduler:
    scheduler = Scheduler(config)
    scheduler._retract = MethodType(_retract_forgets_output, scheduler)  # type: ignore[method-assign]
    return scheduler


MUTANTS["retraction_forgets_a_token"] = retraction_forgets_a_token
