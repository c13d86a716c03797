"""Fills a step with waiting requests while there are slots, pages and prompt tokens left."""

from __future__ import annotations

from mizzen.core.config import SchedulerConfig
from mizzen.core.kv.manager import KvMemory
from mizzen.core.kv.radix_cache import Known
from mizzen.core.kv.radix_node import Node
from mizzen.core.plan_builder import Draft
from mizzen.core.policies import POLICIES
from mizzen.core.sequence import Phase, Sequence
from mizzen.core.waiting_queue import WaitingQueue

_SHARED_TOKENS = 32
"""A request waits for another's chunk when the two have at least so many more tokens in common."""

Behind = tuple[Node, bytes]
"""A node of the prefix tree, and what a request has next."""


class CachedPrefixes:
    """What the prefix cache holds of waiting requests."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory

    def known(self, waiting: Sequence) -> Known:
        """Return what the cache holds of a request; a look goes on from where the one before ended."""
        memory = self._memory
        found = memory.cache.look(
            waiting.data_bytes(), memory.matchable(waiting), waiting.request.salt, waiting.known
        )
        waiting.known = found.whole
        return found


class Admission:
    """The queue, and who leaves it."""

    def __init__(self, config: SchedulerConfig, memory: KvMemory) -> None:
        self.queue = WaitingQueue(POLICIES[config.policy], config.max_waiting_requests)
        self.admissions = 0
        self._memory = memory
        self._prefixes = CachedPrefixes(memory)
        self.reserve = memory.columns(config.reserve_tokens)
        """Pages that are left for each running request."""
        self._short: tuple[tuple[int, int], int, int] | None = None
        """Changes of queue and cache, the pages available and who ran when the first one last found none."""
        self._shares = config.prefix_cache != "none"
        self._shared_pages = memory.columns(_SHARED_TOKENS)

    def admit(self, draft: Draft, running: int, above: int | None = None) -> list[Sequence]:
        """Add starts and chunks of waiting requests to a draft; return the requests.

        With `above`, those of a higher rank alone, and who was overtaken too often. A request that has its
        next pages in common with a prompt that this step runs is passed over: a later step finds them in the
        cache. One that finds no pages ends the round, so that it is not overtaken for ever by smaller ones.
        While nobody can join, the queue is not put in order: that may take a look into the cache for each.
        Whether somebody can is not known where a round passed somebody over.
        """
        admitted: list[Sequence] = []
        if not draft.budget or not self._memory.free_slots or self._still_short(running):
            return admitted
        running_prompts = {self._behind(sequence, sequence.node) for sequence in draft.prefilled}
        passed_over = False
        for sequence in self.queue.order(self.admissions, self._prefixes):
            if not draft.budget or not self._memory.free_slots:
                break
            if above is not None and sequence.rank <= above and not sequence.urgent:
                break
            reserve = self.reserve * (running + len(admitted))
            node = self._memory.match(sequence)
            behind = self._behind(sequence, node)
            if behind is not None and behind in running_prompts:
                self._memory.cache.unlock(node)
                passed_over = True
                continue
            if not self._memory.allocate(sequence, node, reserve):
                self._memory.cache.unlock(node)
                if not passed_over:
                    self._note_short(running + len(admitted))
                break
            running_prompts.add(behind)
            self._start(sequence, draft)
            admitted.append(sequence)
        return admitted

    def known(self, waiting: Sequence) -> Known:
        """Return what the prefix cache holds of a waiting request."""
        return self._prefixes.known(waiting)

    @property
    def _changes(self) -> tuple[int, int]:
        """What moves whenever somebody joined or left the queue, or prefixes came into the cache."""
        return self.queue.changes, self._memory.cache.additions

    def _note_short(self, running: int) -> None:
        self._short = (self._changes, self._memory.available, running)

    def _still_short(self, running: int) -> bool:
        """Tell whether the first one would find no more pages than the last time."""
        if self._short is None:
            return False
        changes, available, beside = self._short
        return changes == self._changes and self._memory.available <= available and running >= beside

    def _start(self, sequence: Sequence, draft: Draft) -> None:
        self.queue.remove(sequence)
        self.admissions += 1
        sequence.phase = Phase.PREFILL
        if not sequence.admitted:
            sequence.admitted = True
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
        row = self._memory.table[sequence.slot, : sequence.pages_held]
        draft.write_row(sequence.slot, 0, row.copy())
        draft.start(sequence)
        draft.chunk(sequence)

    def _behind(self, sequence: Sequence, node: Node | None) -> Behind | None:
        """Return what two requests must have in common for one to wait; None when too little is left."""
        if not self._shares or node is None:
            return None
        end = node.end + self._shared_pages
        if end > self._memory.matchable(sequence):
            return None
        width = 4 * self._memory.page_size
        return node, sequence.data_bytes()[node.end * width : end * width]
