# SPDX-License-Identifier: Apache-2.0
"""Preemption: chooses running requests to retract in favor of a waiting request of higher priority."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from mizzen.core.admission import PrefillAdmission
from mizzen.core.config import SchedulerConfig
from mizzen.core.decode_batch import DecodeBatch
from mizzen.core.inflight import InflightSteps
from mizzen.core.kv.manager import KvManager
from mizzen.core.kv.radix_cache import CachedPrefix
from mizzen.core.kv.radix_node import RadixNode
from mizzen.core.prefill import prefill_tokens_ahead
from mizzen.core.sequence import SequencePhase, SequenceState


class _SpaceAfterRetraction:
    """Slots and pages that will be free once the steps in flight are complete and the victims are retracted.

    Victims are the running requests chosen for retraction.
    """

    def __init__(
        self, memory: KvManager, decode: DecodeBatch, inflight: InflightSteps, prefix: CachedPrefix
    ) -> None:
        self._memory, self._decode, self._prefix = memory, decode, prefix
        self._locks: dict[RadixNode, int] = {}
        """Lock counts that nodes will have when victims and finishing requests have released their locks."""
        self.pages, self.slots = memory.available_pages, len(memory.free_slots)
        for release in inflight.deferred_frees():
            self.slots += release.slot >= 0
            self.pages += len(memory.deferred_pages(release))
        for sequence in inflight.finishing():
            self.add_victim(sequence)

    def add_victim(self, sequence: SequenceState) -> None:
        """Add the slot and pages that a running request frees when it leaves."""
        node, decodes = sequence.node, sequence.phase is SequencePhase.DECODE
        assert node is not None
        computed = self._decode.computed_tokens(sequence) if decodes else sequence.computed
        held = max(self._memory.pages_for(computed), sequence.pages_held)
        self.slots += 1
        self.pages += held - node.end
        ancestor: RadixNode | None = node
        while ancestor is not None:
            self._locks[ancestor] = left = self._locks.get(ancestor, ancestor.lock_count) - 1
            if not left:
                self.pages += len(ancestor.pages)
            ancestor = ancestor.parent

    @property
    def shared_pages(self) -> int:
        """Number of pages of the waiting request's cached prefix that will still be locked.

        The prefix's unlocked pages are not included: `pages` counts them, because they are evictable.
        """
        ends = ((node, min(node.end, self._prefix.pages)) for node in self._prefix.path())
        return sum(end - node.start for node, end in ends if self._locks.get(node, node.lock_count))


def choose_victims(
    head: SequenceState,
    prefix: CachedPrefix,
    running: Iterable[SequenceState],
    memory: KvManager,
    decode: DecodeBatch,
    inflight: InflightSteps,
    reserve: int,
) -> list[SequenceState]:
    """Return the requests to retract so that a waiting request gets a slot and pages.

    Requests are chosen until their retraction suffices: the lowest priority first, and within a priority the
    youngest first. The result is empty if no request needs to be retracted, or if retracting every request
    of lower priority would not suffice.

    Args:
        head: the waiting request.
        prefix: the cached prefix of `head`.
        running: all running requests.
        memory: the free and cached pages, and the free slots.
        decode: the decoding requests.
        inflight: the steps in flight.
        reserve: number of pages that admission must leave available for each running request.
    """
    candidates = list(running)
    lower = [sequence for sequence in candidates if sequence.rank < head.rank and not sequence.starved]
    if not lower:
        return []
    lower.sort(key=lambda sequence: (-sequence.rank, sequence.serial))
    space, need = _SpaceAfterRetraction(memory, decode, inflight, prefix), memory.pages_for(len(head.tokens))
    chosen: list[SequenceState] = []

    def enough() -> bool:
        left = reserve * (len(candidates) - len(chosen))
        return space.slots > 0 and space.pages + space.shared_pages >= need + left

    while lower and not enough():
        chosen.append(lower.pop())
        space.add_victim(chosen[-1])
    return chosen if enough() else []


class Preemption:
    """Chooses running requests to retract so that the head of the waiting queue can be admitted."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KvManager,
        decode_batch: DecodeBatch,
        inflight: InflightSteps,
        admission: PrefillAdmission,
    ) -> None:
        self._steps_in_flight = config.steps_in_flight
        self._kv, self._decode_batch, self._inflight, self._admission = kv, decode_batch, inflight, admission
        self._no_victims_version = -1
        """Version of the queue when `victims` last found no running request with a lower priority than the
        queue's head; -1 before that."""

    def victims(self, prefilling: Collection[SequenceState], prefill_budget: int) -> list[SequenceState]:
        """Return the requests to retract now (see `choose_victims`); may be empty.

        Args:
            prefilling: running requests whose prefill is not finished.
            prefill_budget: maximum number of prompt tokens of the next step.
        """
        queue = self._admission.queue
        head = queue.head()
        if head is None or self._no_victims_version == queue.version:
            return []
        # Pages freed now are reusable only after the steps in flight. Do not preempt if prefills that precede
        # `head` need at least as many steps anyway.
        ahead = prefill_tokens_ahead(head, prefilling)
        if ahead and ahead >= prefill_budget * self._steps_in_flight:
            return []
        running = [*self._decode_batch, *prefilling]
        if all(sequence.rank >= head.rank for sequence in running):
            # This holds until the queue changes, because every request that starts to run leaves the queue.
            self._no_victims_version = queue.version
            return []
        if head.request.images and not self._admission.has_images(head, first=True):
            return []  # it could not use their slots and pages yet
        prefix = self._admission.cached_prefix(head)
        return choose_victims(
            head,
            prefix,
            running,
            self._kv,
            self._decode_batch,
            self._inflight,
            reserve=self._admission.reserve,
        )
