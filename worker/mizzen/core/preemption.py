"""Preemption: chooses running requests to retract for a waiting one of a higher priority."""

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


class _ProjectedSpace:
    """Free slots and pages after the steps in flight, with a set of victims retracted."""

    def __init__(
        self, memory: KvManager, decode: DecodeBatch, flights: InflightSteps, known: CachedPrefix
    ) -> None:
        self._memory, self._decode, self._known = memory, decode, known
        self._locks: dict[RadixNode, int] = {}
        """Remaining lock count of every prefix-cache node that a leaving request holds."""
        self.pages, self.slots = memory.available_pages, len(memory.free_slots)
        for release in flights.deferred_frees():
            self.slots += release.slot >= 0
            self.pages += len(memory.deferred_pages(release))
        for sequence in flights.finishing():
            self.add_victim(sequence)

    def add_victim(self, sequence: SequenceState) -> None:
        """Count the slot and pages that a running request frees if it leaves."""
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
        """Number of cached pages of the waiting request that others hold; unlocked ones count as
        available."""
        ends = ((node, min(node.end, self._known.pages)) for node in self._known.path())
        return sum(end - node.start for node, end in ends if self._locks.get(node, node.lock_count))


def choose_victims(
    head: SequenceState,
    known: CachedPrefix,
    running: Iterable[SequenceState],
    memory: KvManager,
    decode: DecodeBatch,
    flights: InflightSteps,
    reserve: int,
) -> list[SequenceState]:
    """Return the fewest requests to retract so that a waiting one finds a slot and pages.

    The lowest priority is retracted first, within it the youngest request. The list is empty if no request
    needs to be retracted, or if retracting all candidates would not suffice.

    Args:
        head: the waiting request.
        known: its cached prefix.
        running: all running requests.
        memory: pages and slots.
        decode: the decoding requests.
        flights: the steps in flight.
        reserve: number of pages that admission leaves available for each running request.
    """
    candidates = list(running)
    lower = [sequence for sequence in candidates if sequence.rank < head.rank and not sequence.starved]
    if not lower:
        return []
    lower.sort(key=lambda sequence: (-sequence.rank, sequence.serial))
    space, need = _ProjectedSpace(memory, decode, flights, known), memory.pages_for(len(head.tokens))
    chosen: list[SequenceState] = []

    def enough() -> bool:
        left = reserve * (len(candidates) - len(chosen))
        return space.slots > 0 and space.pages + space.shared_pages >= need + left

    while lower and not enough():
        chosen.append(lower.pop())
        space.add_victim(chosen[-1])
    return chosen if enough() else []


class Preemption:
    """Finds the running requests to retract for the head of the queue."""

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
        """Version of the queue at which no running request had a lower priority than the queue's head."""

    def victims(self, prefilling: Collection[SequenceState], prefill_budget: int) -> list[SequenceState]:
        """Return the requests to retract now; empty if the head of the queue needs no preemption.

        Args:
            prefilling: running requests whose prompt is not computed completely.
            prefill_budget: maximum number of prompt tokens of the next step.
        """
        queue = self._admission.queue
        head = queue.head()
        if head is None or self._no_victims_version == queue.version:
            return []
        # Pages freed now are reusable only after the steps in flight. Do not preempt if prefills ahead of
        # `head` would use up those steps anyway.
        ahead = prefill_tokens_ahead(head, prefilling)
        if ahead and ahead >= prefill_budget * self._steps_in_flight:
            return []
        running = [*self._decode_batch, *prefilling]
        if all(sequence.rank >= head.rank for sequence in running):
            # This stays true until the queue changes, because new running requests come from the queue.
            self._no_victims_version = queue.version
            return []
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
