"""Requests that wait for a slot."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import islice

from mizzen.core.policies import WINDOW, CachedPages, Policy
from mizzen.core.sequence import Sequence


class WaitingQueue:
    """New requests in the order of arrival, and retracted ones, which always go first (oldest first)."""

    def __init__(self, policy: Policy, limit: int) -> None:
        self.tokens = 0
        """Known tokens of all that wait."""
        self._policy = policy
        self._limit = limit
        self._new: dict[int, Sequence] = {}
        self._retracted: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._new) + len(self._retracted)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._retracted
        yield from self._new.values()

    @property
    def full(self) -> bool:
        """Whether another new request is one too many."""
        return len(self._new) >= self._limit

    def add(self, sequence: Sequence) -> None:
        """Append a new request."""
        self._new[sequence.rid] = sequence
        self.tokens += len(sequence.tokens)

    def put_back(self, sequence: Sequence) -> None:
        """Add a retracted request."""
        insort(self._retracted, sequence, key=lambda waiting: waiting.serial)
        self.tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        """Take a request out."""
        if self._new.pop(sequence.rid, None) is None:
            self._retracted.remove(sequence)
        self.tokens -= len(sequence.tokens)

    def order(self, admissions: int, cached: CachedPages) -> list[Sequence]:
        """Return the requests that may be admitted now, in the order to try them."""
        head = list(islice(self._new.values(), WINDOW))
        return [*self._retracted, *self._policy(head, admissions, cached)]
