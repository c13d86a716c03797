# SPDX-License-Identifier: Apache-2.0
"""The queue of requests that wait for a slot, by priority and arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain, islice, takewhile

from mizzen.core.policies import REORDER_WINDOW, Policy, Prefixes, may_be_overtaken
from mizzen.core.sequence import SequenceState


class _RankQueue:
    """The waiting requests of one priority."""

    __slots__ = ("new", "retracted")

    def __init__(self) -> None:
        self.new: dict[int, SequenceState] = {}
        """New requests by rid, in order of arrival."""
        self.retracted: list[SequenceState] = []
        """Retracted requests, oldest first."""

    def __iter__(self) -> Iterator[SequenceState]:
        return chain(self.retracted, self.new.values())

    def __len__(self) -> int:
        return len(self.retracted) + len(self.new)


class WaitingQueue:
    """Queue of waiting requests, by descending priority.

    Within a priority, retracted requests (oldest first) precede new requests (in order of arrival). No
    request starves: if `MAX_OVERTAKES` later requests were admitted before it, it precedes all others and is
    not preempted again.
    """

    def __init__(self, policy: Policy, limit: int) -> None:
        self.tokens = 0
        """Number of known tokens of all waiting requests."""
        self.version = 0
        """Number that is incremented whenever a request joins or leaves the queue."""
        self._policy = policy
        self._limit = limit
        self._ranks: dict[int, _RankQueue] = {}
        """Queues by priority, only for priorities that have waiting requests."""
        self._order: list[int] = []
        """Keys of `_ranks`, negated and ascending, so that the highest priority comes first."""
        self._new = self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[SequenceState]:
        return chain.from_iterable(self._by_rank())

    @property
    def full(self) -> bool:
        """Whether the number of new requests has reached the limit."""
        return self._new >= self._limit

    def count_ahead(self, sequence: SequenceState) -> int:
        """Return the number of waiting requests that would precede the new request `sequence`."""
        return sum(len(rank) for number, rank in self._ranks.items() if number >= sequence.rank)

    def add(self, sequence: SequenceState) -> None:
        """Add a new request."""
        self._rank(sequence.rank).new[sequence.rid] = sequence
        self._new += 1
        self._count(sequence, 1)

    def requeue(self, sequence: SequenceState) -> None:
        """Add a retracted request, which precedes the new requests of its priority."""
        insort(self._rank(sequence.rank).retracted, sequence, key=lambda waiting: waiting.serial)
        self._count(sequence, 1)

    def remove(self, sequence: SequenceState) -> None:
        """Remove a request."""
        rank = self._ranks[sequence.rank]
        if rank.new.pop(sequence.rid, None) is None:
            rank.retracted.remove(sequence)
        else:
            self._new -= 1
        if not rank.new and not rank.retracted:
            del self._ranks[sequence.rank]
            del self._order[bisect_left(self._order, -sequence.rank)]
        self._count(sequence, -1)

    def head(self) -> SequenceState | None:
        """Return the first request of the highest priority, or None if the queue is empty."""
        return next(iter(self), None)

    def admission_order(self, admissions: int, prefixes: Prefixes) -> list[SequenceState]:
        """Return the first waiting requests in the order in which admission should try them.

        Starting with the highest priority, the requests of each priority are added until the result has at
        least `REORDER_WINDOW` requests. However, requests that were overtaken too often precede all others,
        even if their priority is lower.

        Args:
            admissions: number of admissions so far.
            prefixes: lookup in the prefix cache, used by some policies.
        """
        ranks = self._by_rank()
        first = next(ranks, None)
        if first is None:
            return []
        ordered = self._ordered(first, admissions, prefixes)
        if len(self._ranks) == 1:
            return ordered
        for rank in ranks:
            if len(ordered) >= REORDER_WINDOW:
                break
            ordered += self._ordered(rank, admissions, prefixes)
        starved = self._starved(admissions)
        return [*starved, *(waiting for waiting in ordered if not waiting.starved)] if starved else ordered

    def _count(self, sequence: SequenceState, step: int) -> None:
        self._size += step
        self.tokens += step * len(sequence.tokens)
        self.version += 1

    def _ordered(self, rank: _RankQueue, admissions: int, prefixes: Prefixes) -> list[SequenceState]:
        head = list(islice(rank.new.values(), REORDER_WINDOW))
        return [*rank.retracted, *self._policy(head, admissions, prefixes)]

    def _starved(self, admissions: int) -> list[SequenceState]:
        """Mark and return the requests below the highest priority that were overtaken too often.

        The oldest request comes first.
        """
        starved: list[SequenceState] = []
        for rank in islice(self._by_rank(), 1, None):
            starved += (waiting for waiting in rank.retracted if not may_be_overtaken(waiting, admissions))
            starved += takewhile(lambda waiting: not may_be_overtaken(waiting, admissions), rank.new.values())
        for waiting in starved:
            waiting.starved = True
        return sorted(starved, key=lambda waiting: waiting.serial)

    def _rank(self, number: int) -> _RankQueue:
        rank = self._ranks.get(number)
        if rank is None:
            rank = self._ranks[number] = _RankQueue()
            insort(self._order, -number)
        return rank

    def _by_rank(self) -> Iterator[_RankQueue]:
        return (self._ranks[-number] for number in self._order)
