"""The requests that decode, as columns: a step touches arrays, never a request."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mizzen.core.request import Int32, Int64
from mizzen.core.sequence import Phase, Sequence
from mizzen.core.stops import UInt8

_NEVER = 1 << 62


class Frame:
    """What steps with the same decode batch share; never changed once made."""

    __slots__ = ("bits", "cells", "prompts", "rids", "rows", "slots", "version")

    def __init__(self, batch: DecodeBatch, version: int, slots: Int32) -> None:
        n = batch.size
        self.version = version
        self.slots = slots
        self.rids: Int64 = batch.rids[:n].copy()
        self.prompts: Int32 = batch.prompts[:n].copy()
        self.bits: UInt8 = batch.bits[:n].copy()
        self.rows: Int64 = slots * np.int64(batch.columns)
        """Index of each request's first cell in the flat page table."""
        self.cells: Int64 = slots * np.int64(batch.width)
        """Index of each request's first token in the flat token history."""


class DecodeBatch:
    """Rows 0..size-1, in no particular but a deterministic order. A row that leaves is filled by the last."""

    def __init__(self, slots: int, columns: int, width: int) -> None:
        self.size = 0
        self.columns = columns
        self.width = width
        self.lengths: Int32 = np.zeros(slots, np.int32)
        """Tokens whose KV exists after all launched steps: the position that the next step runs."""
        self.next_leave = _NEVER
        """No row reaches its limit before this step."""
        self.rids: Int64 = np.zeros(slots, np.int64)
        self.prompts: Int32 = np.zeros(slots, np.int32)
        self.bits: UInt8 = np.zeros(slots, np.uint8)
        self._slots: Int32 = np.zeros(slots, np.int32)
        self._limits: Int32 = np.zeros(slots, np.int32)
        self._sequences: list[Sequence] = []
        self._row_of: dict[int, int] = {}
        self._dirty = False
        self._frame = self._launched = Frame(self, 0, self._slots[:0].copy())

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
                self._frame = Frame(self, self._launched.version + 1, slots)
        return self._frame

    def computed(self, sequence: Sequence) -> int:
        """Return the tokens whose KV exists, of a request in the batch."""
        return int(self.lengths[self._row_of[sequence.slot]])

    def add(self, sequence: Sequence, step: int) -> None:
        """Let a request that has all its KV decode from `step` on."""
        row, slot = self.size, sequence.slot
        self.size += 1
        self._dirty = True
        self._slots[row] = slot
        self.lengths[row] = sequence.computed
        self.rids[row] = sequence.rid
        self.prompts[row] = sequence.prompt_tokens
        self.bits[row] = sequence.stop_bits
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
        for column in (self._slots, self.lengths, self.rids, self.prompts, self.bits, self._limits):
            column[row] = column[last]
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
