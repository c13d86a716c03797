"""Finds the tokens of a step that may end their request, without a look at each request."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from mizzen.core.request import Int32, Int64

UInt8 = NDArray[np.uint8]

_MASK = (1 << 18) - 1
"""Token ids share an entry modulo 262,144; larger vocabularies only meet more candidates."""
_BITS = 8
_STALE = 64
_FEW = 4
"""So few candidates are not worth a look at their bits."""


class StopTable:
    """A filter from token id to the groups of requests that it may end.

    Every distinct set of stop tokens is one of 8 bits (several sets may share one). A request carries its
    set's bit, and a token's entry the bits of all sets that hold it, so one gather and one AND over the batch
    leave the few rows for which the exact set must be asked.
    """

    __slots__ = ("_sets", "_stale", "_table", "_users")

    def __init__(self) -> None:
        self._table: UInt8 = np.zeros(_MASK + 1, dtype=np.uint8)
        self._sets: dict[frozenset[int], tuple[int, int]] = {}
        """Each live set: its bit's number and how many requests carry it."""
        self._users = [0] * _BITS
        """Live sets on each bit."""
        self._stale = 0
        """Sets that are forgotten, but still marked: they cost candidates, nothing else."""

    def acquire(self, tokens: frozenset[int]) -> int:
        """Register a request's stop tokens and return its bits (0 when there is none)."""
        if not tokens:
            return 0
        number, count = self._sets.get(tokens, (-1, 0))
        if not count:
            number = self._users.index(min(self._users))
            self._users[number] += 1
            self._mark(tokens, number)
        self._sets[tokens] = (number, count + 1)
        return 1 << number

    def release(self, tokens: frozenset[int]) -> None:
        """Forget a request's stop tokens."""
        if not tokens:
            return
        number, count = self._sets[tokens]
        if count > 1:
            self._sets[tokens] = (number, count - 1)
            return
        del self._sets[tokens]
        self._users[number] -= 1
        self._stale += 1
        if self._stale > len(self._sets) + _STALE:
            self._rebuild()

    def candidates(self, tokens: Int32, slots: Int64, bits: UInt8) -> list[int]:
        """Return the rows whose token may be a stop token of theirs.

        Args:
            tokens: a token for each row.
            slots: the row's slot.
            bits: the bits of each slot.
        """
        marks = self._table.take(tokens.astype(np.int64), mode="wrap")
        rows = marks.nonzero()[0]
        if len(rows) > _FEW:
            rows = rows[(marks.take(rows) & bits.take(slots.take(rows))) != 0]
        return rows.tolist()

    def _rebuild(self) -> None:
        self._stale = 0
        self._table[:] = 0
        for tokens, (number, _) in self._sets.items():
            self._mark(tokens, number)

    def _mark(self, tokens: Iterable[int], number: int) -> None:
        self._table[[token & _MASK for token in tokens]] |= np.uint8(1 << number)
