# SPDX-License-Identifier: Apache-2.0
"""A filter that finds stop tokens among the sampled tokens of a batch, without a loop over requests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from mizzen.core.request import Int32, Int64

UInt8 = NDArray[np.uint8]

_MASK = (1 << 18) - 1
"""Bit mask that turns a token id into a table index. Token ids that are equal modulo 262,144 share an entry,
so a larger vocabulary only yields more candidates."""
_BITS = 8
_STALE = 64
"""The table is rebuilt when removed sets outnumber live sets by more than this number."""
_FEW = 4
"""For at most this number of candidates, checking the exact sets costs less than filtering by bits."""


class StopTable:
    """Maps a token id to a bit mask of the sets of stop tokens that may contain the token.

    Every distinct set is assigned one of 8 bits; several sets may share a bit. The entry of a token has the
    bits of all sets that contain the token. For each row, the entry of the sampled token is combined (AND)
    with the bit of the request's set. This leaves only a few candidates, for which the caller checks the
    exact set.
    """

    __slots__ = ("_sets", "_stale", "_table", "_users")

    def __init__(self) -> None:
        self._table: UInt8 = np.zeros(_MASK + 1, dtype=np.uint8)
        self._sets: dict[frozenset[int], tuple[int, int]] = {}
        """Bit number and number of requests of each live set."""
        self._users = [0] * _BITS
        """Number of live sets that share each bit."""
        self._stale = 0
        """Number of removed sets whose bits are still in the table, where they only add candidates."""

    def add(self, tokens: frozenset[int]) -> int:
        """Register a request's set of stop tokens; return the set's bit mask, or 0 if the set is empty."""
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
        """Unregister a request's set of stop tokens."""
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
        """Return the indices of rows whose token may be a stop token of the row's request.

        Args:
            tokens: sampled token of each row, int32 [rows].
            slots: slot of each row, int64 [rows].
            bits: result of `add` for the request in each slot, uint8 [slots].
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
