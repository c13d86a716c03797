"""The running decodes, as arrays indexed by slot: a step touches arrays, never single requests.

Every request of the batch gains one token per step. Counters are stored minus the step number; adding the
current step gives the value, so nothing is incremented per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mizzen.core.request import Int32, Int64
from mizzen.core.sequence import SequencePhase, SequenceState

UInt8 = NDArray[np.uint8]
_NEVER = 1 << 62
_FULL = -1


class SampleColumns(NamedTuple):
    """Columns needed to process a step's tokens, one entry per row: int64 [rows] each.

    Add the step number to `tokens` and `offsets`.
    """

    tokens: Int64
    """Index, in the flat token history, of the token that the step samples."""
    rids: Int64
    offsets: Int64
    """Index of that token within the request's output."""


class DecodeFrame:
    """The decode batch as consecutive steps share it; slots ascend."""

    __slots__ = ("columns", "positions", "rows", "slots", "version")

    def __init__(self, version: int, slots: Int32, rows: Int64) -> None:
        self.version = version
        self.slots = slots
        self.rows = rows
        """The slots as int64, for indexing."""
        self.columns: SampleColumns | None = None
        """Columns of `rows`; computed when the first step is complete."""
        self.positions: Int64 | None = None
        """`DecodeBatch._positions` of `rows`; computed if every step starts new pages (page size 1)."""


PageGrowth = tuple[Int32, Int64, Int64]
"""Page-table cells that a step is the first to write to: slots, columns and flat indices, [n] each."""


class DecodeBatch:
    """The set of decoding slots, with the arrays that steps need."""

    def __init__(self, holders: list[SequenceState | None], columns: int, width: int, page_size: int) -> None:
        """Create an empty batch.

        Args:
            holders: the request of each slot, shared with `KvManager`.
            columns: width of the page table, in pages.
            width: width of the token history, in tokens.
            page_size: tokens per page.
        """
        slots = len(holders)
        self.size = 0
        self.next_finish = _NEVER
        """Lower bound of the next step at which a request reaches its length limit."""
        self._page_cells = columns
        self._token_cells = width
        self._page_size = page_size
        self._step = 0
        self._active = np.zeros(slots, np.bool_)
        self._columns: Int64 = np.zeros((3, slots), np.int64)
        """Rows as in `SampleColumns`: tokens, rids, offsets. A column stays until its slot's last step is
        complete."""
        self.stops: UInt8 = np.zeros(slots, np.uint8)
        """Stop-table bits of each slot."""
        self._positions: Int64 = np.zeros((2, slots), np.int64)
        """Position that a step computes, and its index in a flat page table of one-token pages; both minus
        the step number."""
        self._lengths: Int64 = self._positions[0]
        self._phases: Int64 = np.full(slots, _FULL, np.int64)
        """Step number, modulo the page size, at which each slot starts a new page."""
        self._last_steps: Int64 = np.full(slots, _NEVER, np.int64)
        """Last step of each request in the batch, by its length limit."""
        self._slot_owners = holders
        self._dirty = False
        none = np.empty(0, np.int64)
        self._frame = self._launched = DecodeFrame(0, none.astype(np.int32), none)

    def __iter__(self) -> Iterator[SequenceState]:
        return (
            sequence for sequence in map(self._slot_owners.__getitem__, self._active.nonzero()[0]) if sequence
        )

    def frame(self) -> DecodeFrame:
        """Return the current batch; the same object while the set of slots is unchanged."""
        if self._dirty:
            self._dirty = False
            rows = self._active.nonzero()[0]
            slots = rows.astype(np.int32)
            # A slot is reused only after a launch without it, so equal slots mean equal requests.
            before = self._launched.slots
            if len(slots) == len(before) and slots.tobytes() == before.tobytes():
                self._frame = self._launched
            else:
                self._frame = DecodeFrame(self._launched.version + 1, slots, rows)
        return self._frame

    def columns(self, rows: Int64) -> SampleColumns:
        """Return the columns of slots that `set_columns` has filled. `rows`: int64 [n]."""
        tokens, rids, offsets = self._columns.take(rows, axis=1)
        return SampleColumns(tokens, rids, offsets)

    def page_growth(self, step: int) -> PageGrowth | None:
        """Return the page-table cells of the pages that a step starts, or None if it starts none."""
        size = self._page_size
        if size == 1:
            frame = self.frame()
            if frame.positions is None:
                frame.positions = self._positions.take(frame.rows, axis=1)
            lengths, cells = frame.positions + step
            return frame.slots, lengths, cells
        rows = (self._phases == step % size).nonzero()[0]
        if not len(rows):
            return None
        columns = self._lengths.take(rows)
        columns += step
        columns //= size
        return rows.astype(np.int32), columns, rows * self._page_cells + columns

    def computed_tokens(self, sequence: SequenceState) -> int:
        """Return the number of tokens whose KV exists after all launched steps."""
        return self._lengths.item(sequence.slot) + self._step + 1

    def set_columns(self, sequence: SequenceState, step: int) -> None:
        """Set the columns of a completely prefilled request, as if it decoded from `step` on."""
        slot, length = sequence.slot, sequence.computed - step
        self._columns[:, slot] = (
            slot * self._token_cells + length + 1,
            sequence.rid,
            length + 1 - sequence.prompt_tokens,
        )
        self._positions[:, slot] = length, slot * self._page_cells + length
        self.stops[slot] = sequence.stop_bits

    def add(self, sequence: SequenceState, step: int) -> None:
        """Add a request, whose columns are set, to the batch from `step` on."""
        slot = sequence.slot
        self.size += 1
        self._dirty = True
        self._active[slot] = True
        sequence.phase = SequencePhase.DECODE
        self._phases[slot] = (step - sequence.computed) % self._page_size
        self._last_steps[slot] = leave = step + sequence.limit - 2 - sequence.computed
        if leave < self.next_finish:
            self.next_finish = leave

    def remove(self, sequence: SequenceState, phase: SequencePhase, last_step: int) -> None:
        """Remove a request from the batch and store its length and last step in it."""
        slot = sequence.slot
        self.size -= 1
        self._dirty = True
        self._active[slot] = False
        self._phases[slot] = _FULL
        self._last_steps[slot] = _NEVER
        sequence.computed = self._lengths.item(slot) + last_step + 1
        sequence.last_step = last_step
        sequence.phase = phase

    def advance(self, step: int) -> list[SequenceState]:
        """Record that `frame()` was launched as `step`; remove and return requests that end with it."""
        self._launched = self._frame
        self._step = step
        if step < self.next_finish:
            return []
        leaving: list[SequenceState] = []
        for slot in (self._last_steps <= step).nonzero()[0].tolist():
            sequence = self._slot_owners[slot]
            assert sequence is not None
            self.remove(sequence, SequencePhase.LEAVING, step)
            leaving.append(sequence)
        self.next_finish = int(self._last_steps.min())
        return leaving
