# SPDX-License-Identifier: Apache-2.0
"""Inputs of a decode step that are read and updated on the device, so that most steps need no host input.

The host passes changes to a step in one int32 buffer, the inbox, which consists of:

    the number of page writes
    `InboxLayout.writes` flat page-table indices, then as many pages to write there
    `InboxLayout.rows` slots of the batch's rows, then as many next positions of these rows

The inbox stays valid from step to step, because every step advances the positions of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxLayout:
    """Layout of the inbox, the int32 buffer with the host's input to a decode step."""

    writes: int
    """Maximum number of page writes in one step."""
    rows: int
    """Maximum number of rows in a batch."""

    @property
    def table_indices(self) -> slice:
        """Slice of the inbox that holds the flat page-table indices to write to."""
        return slice(1, 1 + self.writes)

    @property
    def pages(self) -> slice:
        """Slice of the inbox that holds the pages to write, in the order of `table_indices`."""
        return slice(1 + self.writes, 1 + 2 * self.writes)

    @property
    def slots(self) -> slice:
        """Slice of the inbox that holds the rows' slots."""
        return slice(1 + 2 * self.writes, 1 + 2 * self.writes + self.rows)

    @property
    def positions(self) -> slice:
        """Slice of the inbox that holds the rows' next positions."""
        return slice(self.slots.stop, self.size)

    @property
    def size(self) -> int:
        """Length of the inbox in elements."""
        return 1 + 2 * self.writes + 2 * self.rows


@triton.jit
def _write_pages_kernel(inbox, table, WRITES: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = index < tl.load(inbox)
    indices = tl.load(inbox + 1 + index, wanted, 0)
    pages = tl.load(inbox + 1 + WRITES + index, wanted, 0)
    tl.store(table + indices, pages, wanted)


@triton.jit
def _decode_inputs_kernel(
    slots, positions, last_tokens, table, tokens, positions_out, slot_mapping, lengths, live, columns, rows,
    scratch, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(slots + row, inside, 0).to(tl.int64)
    position = tl.load(positions + row, inside, 0)
    page = tl.load(table + slot * columns + position // PAGE, inside, 0).to(tl.int64)
    tl.store(tokens + row, tl.load(last_tokens + slot, inside, 0), inside)
    tl.store(positions_out + row, position.to(tl.int64), inside)
    tl.store(slot_mapping + row, page * PAGE + position % PAGE, inside)
    tl.store(lengths + row, position + 1, inside)
    tl.store(live + row, slot != scratch, inside)


def write_pages(inbox: torch.Tensor, layout: InboxLayout, table: torch.Tensor) -> None:
    """Apply the page writes in `inbox` (int32 [layout.size]) to the page table (int32 [slots, columns])."""
    grid = (triton.cdiv(layout.writes, BLOCK),)
    _write_pages_kernel[grid](inbox, table, WRITES=layout.writes, BLOCK=BLOCK, num_warps=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """Inputs of a decode batch; all tensors are [rows]."""

    tokens: torch.Tensor
    """Input tokens, int64."""
    positions: torch.Tensor
    """Positions of the input tokens, int64."""
    slot_mapping: torch.Tensor
    """KV slots of the input tokens, int64."""
    lengths: torch.Tensor
    """Number of tokens whose KV each row reads, including its own token, int32."""
    live: torch.Tensor
    """Rows that are not padding, bool."""


def gather_inputs(
    slots: torch.Tensor,
    positions: torch.Tensor,
    last_tokens: torch.Tensor,
    table: torch.Tensor,
    page_size: int,
    scratch_slot: int,
) -> DecodeInputs:
    """Gather the decode inputs of a batch.

    Args:
        slots: Slot of each row, int32 [rows].
        positions: Position of each row's input token, int32 [rows].
        last_tokens: Last token of every slot, int64 [slots].
        table: Page table, int32 [slots, columns].
        page_size: Tokens per page.
        scratch_slot: Slot of padding rows; -1 for none.
    """
    rows = len(slots)
    tokens, positions_out, slot_mapping = torch.empty((3, rows), dtype=torch.int64, device=slots.device)
    lengths = torch.empty(rows, dtype=torch.int32, device=slots.device)
    live = torch.empty(rows, dtype=torch.bool, device=slots.device)
    _decode_inputs_kernel[(triton.cdiv(rows, BLOCK),)](
        slots, positions, last_tokens, table, tokens, positions_out, slot_mapping, lengths, live,
        table.shape[1], rows, scratch_slot,
        PAGE=page_size, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return DecodeInputs(
        tokens=tokens, positions=positions_out, slot_mapping=slot_mapping, lengths=lengths, live=live
    )
