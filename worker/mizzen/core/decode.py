"""The requests that decode, as columns: a step touches arrays, never a request."""

from __future__ import annotations

import enum
from collections.abc import Iterator

import numpy as np

from mizzen.core.request import Int32, Int64
from mizzen.core.sequence import Phase, Sequence

_NEVER = 1 << 62


class Column(enum.IntEnum):
    """What stays the same while a request decodes."""

    CELL = 0
    """Index of its first token in the flat token history."""
    RID = 1
    PROMPT = 2
    """Prompt tokens."""
    STOPS = 3
    """Its bits of the stop table."""
    PAGES = 4
    """Index of its first cell in the flat page table."""


class Frame:
    """What steps with the same decode batch share; never changed once made."""

    __slots__ = ("columns", "slots", "version")

    def __init__(self, version: int, slots: Int32, columns: Int64) -> None:
        self.version = version
        self.slots = slots
        self.columns = columns
        """int64 [len(Column), n]."""


class DecodeBatch:
    """Rows 0..size-1, in no particular but a deterministic order. A row that leaves is filled by the last."""

    def __init__(self, slots: int, columns: int, width: int) -> None:
        self.size = 0
        self.lengths: Int64 = np.zeros(slots, np.int64)
        """Tokens whose KV exists after all launched steps: the position that the next step runs."""
        self.next_leave = _NEVER
        """No row reaches its limit before this step."""
        self._page_cells = columns
        self._token_cells = width
        self._slots: Int32 = np.zeros(slots, np.int32)
        self._columns: Int64 = np.zeros((len(Column), slots), np.int64)
        self._limits: Int64 = np.zeros(slots, np.int64)
        self._sequences: list[Sequence] = []
        self._row_of: dict[int, int] = {}
        self._dirty = False
        self._frame = self._launched = Frame(0, self._slots[:0].copy(), self._columns[:, :0].copy())

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def frame(self) -> Frame:
        """Return the batch as a step uses it; the same object while nothing changed."""
        if self._dirty:
            self._dirty = False
            slots = self._slots[: self.size].copy()
            if slots.tobytes() == self._launched.slots.tobytes():
                self._frame = self._launched
            else:
                columns = self._columns[:, : self.size].copy()
                self._frame = Frame(self._launched.version + 1, slots, columns)
        return self._frame

    def computed(self, sequence: Sequence) -> int:
        """Return the tokens whose KV exists, of a request in the batch."""
        return int(self.lengths[self._row_of[sequence.slot]])

    def constants(self, sequence: Sequence) -> tuple[int, ...]:
        """Return what `Column` names, of a request that holds a slot."""
        slot = sequence.slot
        return (
            slot * self._token_cells,
            sequence.rid,
            sequence.prompt_tokens,
            sequence.stop_bits,
            slot * self._page_cells,
        )

    def add(self, sequence: Sequence, step: int) -> None:
        """Let a request that has all its KV decode from `step` on."""
        row, slot = self.size, sequence.slot
        self.size += 1
        self._dirty = True
        self._slots[row] = slot
        self.lengths[row] = sequence.computed
        self._columns[:, row] = self.constants(sequence)
        self._limits[row] = sequence.limit
        self._sequences.append(sequence)
        self._row_of[slot] = row
        sequence.phase = Phase.DECODE
        self.next_leave = min(self.next_leave, step + sequence.limit - 2 - sequence.computed)

    def remove(self, sequence: Sequence, phase: Phase, last_step: int) -> None:
        """Take a request out; writes its length back to it."""
        row, last = self._row_of.pop(sequence.slot), self.size - 1
        sequence.computed = int(self.lengths[row])
        sequence.last_step = last_step
        sequence.phase = phase
        self.size = last
        self._dirty = True
        moved = self._sequences.pop()
        if row == last:
            return
        self._slots[row] = self._slots[last]
        self.lengths[row] = self.lengths[last]
        self._limits[row] = self._limits[last]
        self._columns[:, row] = self._columns[:, last]
        self._sequences[row] = moved
        self._row_of[moved.slot] = row

    def advance(self, step: int) -> list[Sequence]:
        """Count the step just launched with `frame()`; remove and return those whose last step it was."""
        self._launched = self._frame
        lengths = self.lengths[: self.size]
        lengths += 1
        if step < self.next_leave:
            return []
        left = self._limits[: self.size] - 1 - lengths
        leaving = [self._sequences[row] for row in (left <= 0).nonzero()[0]]
        for sequence in leaving:
            self.remove(sequence, Phase.LEAVING, step)
        self.next_leave = step + int(left[left > 0].min()) if self.size else _NEVER
        return leaving
