"""Requests that wait for a slot."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain, islice, takewhile

from mizzen.core.policies import WINDOW, Policy, Prefixes, is_patient
from mizzen.core.sequence import Sequence


class _Rank:
    """The requests of one rank."""

    __slots__ = ("new", "retracted")

    def __init__(self) -> None:
        self.new: dict[int, Sequence] = {}
        """In the order of arrival."""
        self.retracted: list[Sequence] = []
        """Oldest first."""

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self.retracted, self.new.values())

    def __len__(self) -> int:
        return len(self.retracted) + len(self.new)


class WaitingQueue:
    """New requests in the order of arrival, and retracted ones, which always go first (oldest first).

    Higher ranks go before lower ones. Nobody starves: a request of a lower rank that was overtaken by
    `PATIENCE` admissions goes before all, and is not preempted any more.
    """

    def __init__(self, policy: Policy, limit: int) -> None:
        self.tokens = 0
        """Known tokens of all that wait."""
        self.changes = 0
        """How often somebody joined or left."""
        self._policy = policy
        self._limit = limit
        self._ranks: dict[int, _Rank] = {}
        """None is empty."""
        self._order: list[int] = []
        """Their numbers, negative: the highest rank first."""
        self._new = self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._by_rank())

    @property
    def full(self) -> bool:
        """Whether another new request is one too many."""
        return self._new >= self._limit

    def ahead(self, sequence: Sequence) -> int:
        """Return how many who wait go before a new request, for they are older and of no lower rank."""
        return sum(len(rank) for number, rank in self._ranks.items() if number >= sequence.rank)

    def add(self, sequence: Sequence) -> None:
        """Append a new request."""
        self._rank(sequence.rank).new[sequence.rid] = sequence
        self._new += 1
        self._count(sequence, 1)

    def put_back(self, sequence: Sequence) -> None:
        """Add a retracted request."""
        insort(self._rank(sequence.rank).retracted, sequence, key=lambda waiting: waiting.serial)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Take a request out."""
        rank = self._ranks[sequence.rank]
        if rank.new.pop(sequence.rid, None) is None:
            rank.retracted.remove(sequence)
        else:
            self._new -= 1
        if not rank.new and not rank.retracted:
            del self._ranks[sequence.rank]
            del self._order[bisect_left(self._order, -sequence.rank)]
        self._count(sequence, -1)

    def head(self) -> Sequence | None:
        """Return the first request of the highest rank."""
        return next(iter(self), None)

    def order(self, admissions: int, prefixes: Prefixes) -> list[Sequence]:
        """Return the requests that may be admitted now, in the order to try them."""
        ranks = self._by_rank()
        first = next(ranks, None)
        if first is None:
            return []
        ordered = self._ordered(first, admissions, prefixes)
        if len(self._ranks) == 1:
            return ordered
        for rank in ranks:
            if len(ordered) >= WINDOW:
                break
            ordered += self._ordered(rank, admissions, prefixes)
        urgent = self._urgent(admissions)
        return [*urgent, *(waiting for waiting in ordered if not waiting.urgent)] if urgent else ordered

    def _count(self, sequence: Sequence, step: int) -> None:
        self._size += step
        self.tokens += step * len(sequence.tokens)
        self.changes += 1

    def _ordered(self, rank: _Rank, admissions: int, prefixes: Prefixes) -> list[Sequence]:
        head = list(islice(rank.new.values(), WINDOW))
        return [*rank.retracted, *self._policy(head, admissions, prefixes)]

    def _urgent(self, admissions: int) -> list[Sequence]:
        """Note and return those of lower ranks that were overtaken too often, the oldest first."""
        found: list[Sequence] = []
        for rank in islice(self._by_rank(), 1, None):
            found += (one for one in rank.retracted if not is_patient(one, admissions))
            found += takewhile(lambda one: not is_patient(one, admissions), rank.new.values())
        for waiting in found:
            waiting.urgent = True
        return sorted(found, key=lambda waiting: waiting.serial)

    def _rank(self, number: int) -> _Rank:
        rank = self._ranks.get(number)
        if rank is None:
            rank = self._ranks[number] = _Rank()
            insort(self._order, -number)
        return rank

    def _by_rank(self) -> Iterator[_Rank]:
        return (self._ranks[-number] for number in self._order)
