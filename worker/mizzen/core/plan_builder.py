"""A step's plan in the making."""

from __future__ import annotations

import numpy as np
from msgspec import Struct, field

from mizzen.core.decode_batch import Frame
from mizzen.core.kv.manager import KvMemory
from mizzen.core.report import asks_of
from mizzen.core.request import Int32
from mizzen.core.sequence import Sequence
from mizzen.core.step_plan import PageWrites, PrefillChunk, SlotStart, StepPlan

_NO_WRITES = PageWrites()


class Draft(Struct):
    """Collects page writes, starts and chunks. Later writes to a cell win."""

    budget: int
    """Prompt tokens that the step may still take."""
    memory: KvMemory
    prompt_tokens: int = 0
    """That it takes so far."""
    starts: list[SlotStart] = field(default_factory=list)
    chunks: list[PrefillChunk] = field(default_factory=list)
    prefilled: list[Sequence] = field(default_factory=list)
    """The chunks' requests."""
    writes: list[tuple[Int32, Int32, Int32]] = field(default_factory=list)
    """Slots, columns and pages of cells to set; the arrays must not change later."""

    def write_row(self, slot: int, first: int, pages: Int32) -> None:
        """Set the cells of one slot from column `first` on."""
        slots, columns = self.memory.cells(slot, first, first + len(pages))
        self.writes.append((slots, columns, pages))

    def start(self, sequence: Sequence) -> None:
        """Let a request take its slot."""
        request = sequence.request
        self.starts.append(
            SlotStart(
                slot=sequence.slot,
                length=sequence.computed,
                sampling=request.sampling,
                seed=request.seed,
                output=len(sequence.tokens) - sequence.prompt_tokens,
                asks=asks_of(sequence),
            )
        )

    def chunk(self, sequence: Sequence) -> None:
        """Run as many of a request's known tokens as the budget allows."""
        start, tokens = sequence.computed, sequence.tokens
        known = len(tokens)
        end = min(known, start + self.budget)
        self.budget -= end - start
        self.prompt_tokens += end - start
        self.chunks.append(
            PrefillChunk(slot=sequence.slot, start=start, tokens=tokens[start:end], last=end == known)
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
        parts = self.writes
        if not parts:
            return _NO_WRITES
        if len(parts) == 1:
            slots, columns, pages = parts[0]
            return PageWrites(slots if slots.strides[0] else slots.copy(), columns, pages)
        return PageWrites(*map(np.concatenate, zip(*parts, strict=True)))
