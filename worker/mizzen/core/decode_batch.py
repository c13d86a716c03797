# SPDX-License-Identifier: Apache-2.0
"""The decoding requests, as arrays indexed by slot, so that a step needs no loop over requests.

Every request of the batch gains one token per step. Counters that grow with it are stored minus the step
number: adding the number of the current step gives their value, so nothing is incremented per step.
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
    """Request and position of each token that a step samples; int64 [rows] each.

    `tokens` and `offsets` are stored minus the step number: add it before use.
    """

    tokens: Int64
    """Index in `KvManager.flat_tokens` at which the sampled token is stored."""
    rids: Int64
    """Id of the request that the token belongs to."""
    offsets: Int64
    """Index of the sampled token within the request's output."""


class DecodeFrame:
    """The slots that decode in a step; steps share one object while the slots are the same.

    Slots with more tokens come first. Attention works on rows in this order, so a step does not end with a
    long row that began last (Graham 1969: longest processing time first).
    """

    __slots__ = ("columns", "positions", "rows", "slots", "version")

    def __init__(self, version: int, slots: Int32, rows: Int64) -> None:
        self.version = version
        self.slots = slots
        self.rows = rows
        """`slots` as int64, for indexing arrays."""
        self.columns: SampleColumns | None = None
        """`SampleColumns` of `rows`; None until the first step with this frame is complete."""
        self.positions: Int64 | None = None
        """Page-table entry of the page that a step starts in each slot, int64 [2, rows].

        The first row is the entry's column, the second its index in the flattened page table. Both are stored
        minus the step number. Computed only if the page size is 1: then each step starts a page in each slot.
        """


PageGrowth = tuple[Int32, Int64, Int64]
"""Page-table entries of the pages that a step starts: slots (int32), columns (int64), and indices of the
entries in the flattened page table (int64)."""


class DecodeBatch:
    """The set of decoding requests, as arrays indexed by slot."""

    def __init__(
        self, slot_owners: list[SequenceState | None], columns: int, width: int, page_size: int
    ) -> None:
        """Create an empty batch.

        Args:
            slot_owners: request in each slot; the list of `KvManager`, which updates it.
            columns: width of the page table, in pages.
            width: width of `KvManager.tokens`, in tokens.
            page_size: number of tokens per page.
        """
        slots = len(slot_owners)
        self.size = 0
        self.next_finish = _NEVER
        """Step number before which no request reaches its length limit."""
        self._page_columns = columns
        self._token_columns = width
        self._page_size = page_size
        self._step = 0
        self._active = np.zeros(slots, np.bool_)
        self._columns: Int64 = np.zeros((3, slots), np.int64)
        """`SampleColumns` of all slots, int64 [3, slots]. A slot's column is valid until the last step that
        uses the slot is complete."""
        self.stops: UInt8 = np.zeros(slots, np.uint8)
        """`StopTable` bits of the request in each slot."""
        self._positions: Int64 = np.zeros((2, slots), np.int64)
        """Sequence position of the token that a step computes in each slot, and the sum of this position and
        the index at which the slot's row starts in the flattened page table. Both are stored minus the step
        number. At page size 1, the sum is the index of the position's page-table entry."""
        self._lengths: Int64 = self._positions[0]
        self._phases: Int64 = np.full(slots, _FULL, np.int64)
        """Step number, modulo the page size, at which each slot starts a new page; `_FULL` for slots that do
        not decode."""
        self._last_steps: Int64 = np.full(slots, _NEVER, np.int64)
        """Step at which the request in each slot reaches its length limit; `_NEVER` for slots that do not
        decode."""
        self._slot_owners = slot_owners
        self._dirty = False
        none = np.empty(0, np.int64)
        self._frame = self._launched = DecodeFrame(0, none.astype(np.int32), none)

    def __iter__(self) -> Iterator[SequenceState]:
        return (
            sequence for sequence in map(self._slot_owners.__getitem__, self._active.nonzero()[0]) if sequence
        )

    def frame(self) -> DecodeFrame:
        """Return the current batch: the same object as before if the set of slots has not changed."""
        if self._dirty:
            self._dirty = False
            rows = self._active.nonzero()[0]
            # All requests of the batch grow alike, so their order stays.
            rows = rows[np.argsort(-self._lengths[rows], kind="stable")]
            slots = rows.astype(np.int32)
            # A slot is reused only after a launch without it, so equal slots mean equal requests.
            before = self._launched.slots
            if len(slots) == len(before) and slots.tobytes() == before.tobytes():
                self._frame = self._launched
            else:
                self._frame = DecodeFrame(self._launched.version + 1, slots, rows)
        return self._frame

    def columns(self, rows: Int64) -> SampleColumns:
        """Return the `SampleColumns` of the slots `rows`, int64 [n].

        `set_columns` must have been called for each of these slots.
        """
        tokens, rids, offsets = self._columns.take(rows, axis=1)
        return SampleColumns(tokens, rids, offsets)

    def page_growth(self, step: int) -> PageGrowth | None:
        """Return the page-table entries of the pages that `step` starts, or None if it starts no page."""
        size = self._page_size
        if size == 1:
            frame = self.frame()
            if frame.positions is None:
                frame.positions = self._positions.take(frame.rows, axis=1)
            lengths, flat_indices = frame.positions + step
            return frame.slots, lengths, flat_indices
        rows = (self._phases == step % size).nonzero()[0]
        if not len(rows):
            return None
        columns = self._lengths.take(rows)
        columns += step
        columns //= size
        return rows.astype(np.int32), columns, rows * self._page_columns + columns

    def computed_tokens(self, sequence: SequenceState) -> int:
        """Return the number of tokens of a request whose KV exists once all launched steps are complete."""
        return self._lengths.item(sequence.slot) + self._step + 1

    def set_columns(self, sequence: SequenceState, step: int) -> None:
        """Set the sample columns, position and stop bits of a request whose first decode step is `step`.

        Required also for a request that finishes with its prefill, although it never decodes.
        """
        slot, length = sequence.slot, sequence.computed - step
        self._columns[:, slot] = (
            slot * self._token_columns + length + 1,
            sequence.rid,
            length + 1 - sequence.prompt_tokens,
        )
        self._positions[:, slot] = length, slot * self._page_columns + length
        self.stops[slot] = sequence.stop_bits

    def add(self, sequence: SequenceState, step: int) -> None:
        """Add a request to the batch from `step` on; call `set_columns` first."""
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
        """Remove a request from the batch; set its phase, its last step and its number of computed tokens."""
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
        """Record that the batch returned by `frame()` was launched as step number `step`.

        Removes from the batch the requests that reach their length limit in this step, and returns them.
        """
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
