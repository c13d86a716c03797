"""A batch-wide filter that finds sampled stop tokens without visiting each request."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from mizzen.core.request import Int32, Int64

UInt8 = NDArray[np.uint8]

_MASK = (1 << 18) - 1
"""Token ids share an entry modulo 262,144; larger vocabularies only yield more candidates."""
_BITS = 8
_STALE = 64
_FEW = 4
"""Number of candidates up to which filtering by bits is not worth its cost."""


class StopTable:
    """A filter from token id to the sets of stop tokens that contain it.

    Every distinct set is assigned one of 8 bits (several sets may share one). A request carries the bit of
    its set, and a token's entry the bits of all sets that contain it. One gather and one AND over the batch
    leave the few rows for which the exact set must be checked.
    """

    __slots__ = ("_sets", "_stale", "_table", "_users")

    def __init__(self) -> None:
        self._table: UInt8 = np.zeros(_MASK + 1, dtype=np.uint8)
        self._sets: dict[frozenset[int], tuple[int, int]] = {}
        """Bit number and number of requests, by set of stop tokens."""
        self._users = [0] * _BITS
        """Number of live sets on each bit."""
        self._stale = 0
        """Number of removed sets whose marks remain; they only cost additional candidates."""

    def add(self, tokens: frozenset[int]) -> int:
        """Register a request's stop tokens and return its bits (0 if it has none)."""
        if not tokens:
            return 0
        number, count = self._sets.get(tokens, (-1, 0))
        if not count:
            number = self._users.index(min(self._users))
            self._users[number] += 1
            self._mark(tokens, number)
        self._sets[tokens] = (number, count + 1)
        return 1 << number

    def remove(self, tokens: frozenset[int]) -> None:
        """Unregister a request's stop tokens."""
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
        """Return the rows whose token may be one of their stop tokens.

        Args:
            tokens: the token of each row, int32 [rows].
            slots: the slot of each row, int64 [rows].
            bits: the bits of each slot, uint8 [slots].
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
