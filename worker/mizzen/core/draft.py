"""A step's plan in the making."""

from __future__ import annotations

import numpy as np

from mizzen.core.decode import Frame
from mizzen.core.plan import PageWrites, PrefillChunk, SlotStart, StepPlan
from mizzen.core.request import Int32
from mizzen.core.sequence import Sequence

_NO_WRITES = PageWrites()


class Draft:
    """Collects page writes, starts and chunks. Later writes to a cell win."""

    __slots__ = ("_slots_columns_pages", "budget", "chunks", "prefilled", "starts")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Prompt tokens that the step may still take."""
        self.starts: list[SlotStart] = []
        self.chunks: list[PrefillChunk] = []
        self.prefilled: list[Sequence] = []
        """The chunks' requests."""
        self._slots_columns_pages: list[tuple[Int32, Int32, Int32]] = []

    def write(self, slots: Int32, columns: Int32, pages: Int32) -> None:
        """Set cells of the page table; arrays must not change later."""
        self._slots_columns_pages.append((slots, columns, pages))

    def write_row(self, slot: int, first: int, pages: Int32) -> None:
        """Set the cells of one slot from column `first` on."""
        count = len(pages)
        self.write(np.full(count, slot, np.int32), np.arange(first, first + count, dtype=np.int32), pages)

    def start(self, sequence: Sequence) -> None:
        """Let a request take its slot."""
        request = sequence.request
        self.starts.append(
            SlotStart(
                slot=sequence.slot, length=sequence.computed, sampling=request.sampling, seed=request.seed
            )
        )

    def chunk(self, sequence: Sequence) -> None:
        """Run as many of a request's known tokens as the budget allows."""
        start, known = sequence.computed, len(sequence.tokens)
        end = min(known, start + self.budget)
        self.budget -= end - start
        self.chunks.append(
            PrefillChunk(
                slot=sequence.slot, start=start, tokens=sequence.tokens[start:end], last=end == known
            )
        )
        self.prefilled.append(sequence)
        sequence.computed = end

    def plan(self, step: int, frame: Frame) -> StepPlan:
        """Return the finished plan."""
        return StepPlan(
            step=step,
            decode=frame.slots,
            decode_version=frame.version,
            pages=self._writes(),
            starts=tuple(self.starts),
            prefill=tuple(self.chunks),
        )

    def _writes(self) -> PageWrites:
        parts = self._slots_columns_pages
        if not parts:
            return _NO_WRITES
        if len(parts) == 1:
            return PageWrites(*parts[0])
        return PageWrites(*(np.concatenate(column) for column in zip(*parts, strict=True)))
