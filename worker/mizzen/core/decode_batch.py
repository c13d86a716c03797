"""The requests that decode, as columns by slot: a step touches arrays, never a request.

Every request of the batch gains one token a step, so whatever counts tokens grows by one a step. It is kept
less the number of the step: a step adds its own number, and nothing has to be counted up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mizzen.core.request import Int32, Int64
from mizzen.core.sequence import Phase, Sequence

UInt8 = NDArray[np.uint8]
_NEVER = 1 << 62
_FULL = -1


class Columns(NamedTuple):
    """What reading a step's tokens needs of some slots, one entry each.

    `tokens` and `offsets` are to be increased by the step's number.
    """

    tokens: Int64
    """Index in the flat token history of the token that a step samples."""
    rids: Int64
    offsets: Int64
    """Index of that token within the request's output."""


class Frame:
    """What steps with the same decode batch share; slots ascend."""

    __slots__ = ("columns", "rows", "slots", "version", "where")

    def __init__(self, version: int, slots: Int32, rows: Int64) -> None:
        self.version = version
        self.slots = slots
        self.rows = rows
        """The slots, to index with."""
        self.columns: Columns | None = None
        """Made when the first step is read."""
        self.where: Int64 | None = None
        """The rows' part of `DecodeBatch._where`; made when pages grow in every step."""


Growth = tuple[Int32, Int64, Int64]
"""Cells of the page table that a step is the first to write to: slots, columns, and their indices in it."""


class DecodeBatch:
    """Which slots decode, and what steps need of them."""

    def __init__(self, holders: list[Sequence | None], columns: int, width: int, page_size: int) -> None:
        """Take who has each slot, and the widths of the rows of page table and token history."""
        slots = len(holders)
        self.size = 0
        self.next_leave = _NEVER
        """No request reaches its limit before this step."""
        self._page_cells = columns
        self._token_cells = width
        self._page_size = page_size
        self._step = 0
        self._active = np.zeros(slots, np.bool_)
        self._matrix: Int64 = np.zeros((3, slots), np.int64)
        """As in `Columns`: tokens, rids, offsets. A slot's column stays until its last step is read."""
        self.stops: UInt8 = np.zeros(slots, np.uint8)
        """Bits of the stop table, by slot."""
        self._where: Int64 = np.zeros((2, slots), np.int64)
        """Position that a step runs, and its index in a flat page table of pages of one token; both less the
        step's number."""
        self._lengths: Int64 = self._where[0]
        self._phases: Int64 = np.full(slots, _FULL, np.int64)
        """The steps, modulo the page size, that begin a page."""
        self._leaves: Int64 = np.full(slots, _NEVER, np.int64)
        """The last step of each request in the batch."""
        self._holders = holders
        self._dirty = False
        none = np.empty(0, np.int64)
        self._frame = self._launched = Frame(0, none.astype(np.int32), none)

    def __iter__(self) -> Iterator[Sequence]:
        return (
            sequence for sequence in map(self._holders.__getitem__, self._active.nonzero()[0]) if sequence
        )

    def frame(self) -> Frame:
        """Return the batch as a step uses it; the same object while nothing changed."""
        if self._dirty:
            self._dirty = False
            rows = self._active.nonzero()[0]
            slots = rows.astype(np.int32)
            # A slot that left comes back after a launch without it, so equal slots are equal requests.
            before = self._launched.slots
            if len(slots) == len(before) and slots.tobytes() == before.tobytes():
                self._frame = self._launched
            else:
                self._frame = Frame(self._launched.version + 1, slots, rows)
        return self._frame

    def columns(self, rows: Int64) -> Columns:
        """Return the columns of placed slots."""
        tokens, rids, offsets = self._matrix.take(rows, axis=1)
        return Columns(tokens, rids, offsets)

    def growth(self, step: int) -> Growth | None:
        """Return where a step begins pages."""
        size = self._page_size
        if size == 1:
            frame = self.frame()
            if frame.where is None:
                frame.where = self._where.take(frame.rows, axis=1)
            lengths, cells = frame.where + step
            return frame.slots, lengths, cells
        rows = (self._phases == step % size).nonzero()[0]
        if not len(rows):
            return None
        columns = self._lengths.take(rows)
        columns += step
        columns //= size
        return rows.astype(np.int32), columns, rows * self._page_cells + columns

    def computed(self, sequence: Sequence) -> int:
        """Return the tokens whose KV exists after all launched steps, of a request in the batch."""
        return self._lengths.item(sequence.slot) + self._step + 1

    def place(self, sequence: Sequence, step: int) -> None:
        """Fill the columns of a request that has all its KV, as if it decoded from `step` on."""
        slot, length = sequence.slot, sequence.computed - step
        self._matrix[:, slot] = (
            slot * self._token_cells + length + 1,
            sequence.rid,
            length + 1 - sequence.prompt_tokens,
        )
        self._where[:, slot] = length, slot * self._page_cells + length
        self.stops[slot] = sequence.stop_bits

    def add(self, sequence: Sequence, step: int) -> None:
        """Let a placed request decode from `step` on."""
        slot = sequence.slot
        self.size += 1
        self._dirty = True
        self._active[slot] = True
        sequence.phase = Phase.DECODE
        self._phases[slot] = (step - sequence.computed) % self._page_size
        self._leaves[slot] = leave = step + sequence.limit - 2 - sequence.computed
        if leave < self.next_leave:
            self.next_leave = leave

    def remove(self, sequence: Sequence, phase: Phase, last_step: int) -> None:
        """Take a request out; writes its length back to it."""
        slot = sequence.slot
        self.size -= 1
        self._dirty = True
        self._active[slot] = False
        self._phases[slot] = _FULL
        self._leaves[slot] = _NEVER
        sequence.computed = self._lengths.item(slot) + last_step + 1
        sequence.last_step = last_step
        sequence.phase = phase

    def advance(self, step: int) -> list[Sequence]:
        """Take note that `frame()` was launched; remove and return those whose last step it was."""
        self._launched = self._frame
        self._step = step
        if step < self.next_leave:
            return []
        leaving: list[Sequence] = []
        for slot in (self._leaves <= step).nonzero()[0].tolist():
            sequence = self._holders[slot]
            assert sequence is not None
            self.remove(sequence, Phase.LEAVING, step)
            leaving.append(sequence)
        self.next_leave = int(self._leaves.min())
        return leaving
