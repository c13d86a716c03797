# SPDX-License-Identifier: Apache-2.0
"""Admission: moves waiting requests into a step while slots, pages and prefill tokens are left."""

from __future__ import annotations

from mizzen.core.config import SchedulerConfig
from mizzen.core.images.planner import ImagePlanner
from mizzen.core.kv.manager import KvManager
from mizzen.core.kv.radix_cache import CachedPrefix
from mizzen.core.kv.radix_node import RadixNode
from mizzen.core.plan_builder import PlanBuilder
from mizzen.core.policies import POLICIES
from mizzen.core.sequence import SequencePhase, SequenceState
from mizzen.core.waiting_queue import WaitingQueue

_SHARED_TOKENS = 32
"""Minimum number of uncached prompt tokens that two requests must have in common for the later one to wait
until the earlier one's prefill has cached them."""

PREFETCHING_REQUESTS = 32
"""A new request requests the pixels of its images at once only if fewer requests than this wait before it, so
that it does not use up the room for the pixels of requests before it."""

SharedPrefixKey = tuple[RadixNode, bytes]
"""Last cached node of a request's prefix, and the bytes of the tokens in the next pages.

Requests with equal keys have a longer prefix in common than the cache holds."""


class PrefixLookup:
    """Looks up the cached prefixes of waiting requests."""

    def __init__(self, memory: KvManager) -> None:
        self._memory = memory

    def cached_prefix(self, waiting: SequenceState) -> CachedPrefix:
        """Return the cached prefix of a waiting request, continuing from the node of its previous lookup."""
        memory = self._memory
        prefix = memory.cache.peek(
            waiting.tokens_as_bytes(),
            memory.matchable_pages(waiting),
            waiting.request.salt,
            waiting.prefix_hint,
        )
        waiting.prefix_hint = prefix.last_node
        return prefix


class PrefillAdmission:
    """Owns the waiting queue and decides which of its requests a step admits."""

    def __init__(self, config: SchedulerConfig, memory: KvManager, images: ImagePlanner) -> None:
        self._images = images
        self.queue = WaitingQueue(POLICIES[config.policy], config.max_waiting_requests)
        self.admissions = 0
        self._kv = memory
        self._prefixes = PrefixLookup(memory)
        self.reserve = memory.pages_for(config.reserve_tokens)
        """Number of pages per running request that admission leaves available."""
        self._blocked_at: tuple[tuple[int, int], int, int] | None = None
        """State when the last attempt ran out of pages: versions of queue and prefix cache, number of
        available pages, number of running requests. None if the last attempt did not run out. Otherwise, the
        next one is made when a version has changed, more pages are available, or fewer requests run."""
        self._shares = config.prefix_cache != "none"
        self._whole_prompts = config.whole_prompts
        self._shared_pages = memory.pages_for(_SHARED_TOKENS)

    def admit(self, builder: PlanBuilder, running: int, above_rank: int | None = None) -> list[SequenceState]:
        """Admit waiting requests: add their slot starts and first chunks to a plan, and return the requests.

        A request that shares its next pages with another prompt in this step is skipped, because a later
        step finds these pages in the prefix cache, and so is one that waits for images. Admission stops at
        the first request that needs more pages than are available, so that smaller requests cannot overtake
        it forever. If no request was skipped before it, the next attempt is made only under the conditions
        given at `_blocked_at`, because ordering the queue may look up the prefix of every request. With
        `whole_prompts`, admission also stops at the first prompt that exceeds the budget.

        Args:
            builder: the plan under construction.
            running: number of running requests.
            above_rank: admit only requests whose priority is higher than this, or that were overtaken too
                often; None admits any request.
        """
        admitted: list[SequenceState] = []
        if not builder.budget or not self._kv.free_slots or self._still_blocked(running):
            return admitted
        running_keys = {self._computed_prefix_key(sequence, sequence.node) for sequence in builder.prefilled}
        skipped = False
        for index, sequence in enumerate(self.queue.admission_order(self.admissions, self._prefixes)):
            if not builder.budget or not self._kv.free_slots:
                break
            if self._whole_prompts and len(sequence.tokens) > builder.budget:
                break
            if above_rank is not None and sequence.rank <= above_rank and not sequence.starved:
                break
            if sequence.request.images and not self.has_images(sequence, first=not index):
                skipped = True
                continue
            reserve = self.reserve * (running + len(admitted))
            node = self._kv.match(sequence)
            key = self._shared_prefix_key(sequence, node)
            begins = not sequence.request.images or builder.can_begin(sequence, node.end * self._kv.page_size)
            if not begins or (key is not None and key in running_keys):
                self._kv.cache.unlock(node)
                skipped = True
                continue
            if not self._kv.allocate(sequence, node, reserve):
                self._kv.cache.unlock(node)
                if not skipped:
                    self._record_blocked(running + len(admitted))
                break
            running_keys.add(self._computed_prefix_key(sequence, node))
            self._start(sequence, builder)
            admitted.append(sequence)
        return admitted

    def has_images(self, waiting: SequenceState, *, first: bool = False) -> bool:
        """Return whether all images of a waiting request can be computed; request missing ones.

        `first` says whether the request is the first one to be admitted.
        """
        pages = self._prefixes.cached_prefix(waiting).pages
        return self._images.request_missing(waiting, pages * self._kv.page_size, first=first)

    def cached_prefix(self, waiting: SequenceState) -> CachedPrefix:
        """Return the cached prefix of a waiting request."""
        return self._prefixes.cached_prefix(waiting)

    @property
    def _version(self) -> tuple[int, int]:
        """Versions of the waiting queue and of the prefix cache's contents, in this order."""
        return self.queue.version, self._kv.cache.additions

    def _record_blocked(self, running: int) -> None:
        self._blocked_at = (self._version, self._kv.available_pages, running)

    def _still_blocked(self, running: int) -> bool:
        """Return whether admission would run out of pages again, judged by the state in `_blocked_at`."""
        if self._blocked_at is None:
            return False
        changes, available, running_then = self._blocked_at
        return changes == self._version and self._kv.available_pages <= available and running >= running_then

    def _start(self, sequence: SequenceState, builder: PlanBuilder) -> None:
        self.queue.remove(sequence)
        self.admissions += 1
        sequence.phase = SequencePhase.PREFILL
        if not sequence.admitted:
            sequence.admitted = True
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
            if sequence.request.images:
                self._images.count_admitted(sequence)
        if sequence.pages_held:
            row = self._kv.page_table[sequence.slot, : sequence.pages_held]
            builder.write_pages(sequence.slot, 0, row.copy())
        builder.start_slot(sequence)
        builder.add_chunk(sequence)

    def _shared_prefix_key(self, sequence: SequenceState, node: RadixNode) -> SharedPrefixKey | None:
        """Return the key of the next pages after `node` that a waiting request could take from the cache.

        It equals the `_computed_prefix_key` of a request that computes these pages. Returns None if the
        request can take too few pages.
        """
        return self._next_pages_key(sequence, node, self._kv.matchable_pages(sequence))

    def _computed_prefix_key(self, sequence: SequenceState, node: RadixNode | None) -> SharedPrefixKey | None:
        """Return the key of the next pages after `node` that an admitted request computes and then caches.

        Returns None if it computes too few pages.
        """
        return self._next_pages_key(sequence, node, len(sequence.tokens) // self._kv.page_size)

    def _next_pages_key(
        self, sequence: SequenceState, node: RadixNode | None, pages: int
    ) -> SharedPrefixKey | None:
        """Return a key of the `_shared_pages` pages that follow a request's cached prefix.

        Args:
            sequence: a waiting or prefilling request.
            node: the last node of its cached prefix.
            pages: the number of pages, counted from the first one, that the key may describe; the result is
                None if they are too few, or if there is no prefix cache.
        """
        if not self._shares or node is None:
            return None
        end = node.end + self._shared_pages
        if end > pages:
            return None
        width = 4 * self._kv.page_size
        return node, sequence.tokens_as_bytes()[node.end * width : end * width]
