"""Inputs of a decode step that are read and updated on the device, so that the host sends nothing per step.

The host's message to a step is one int32 buffer, the inbox:

    0         number of page writes
    1         columns (`InboxLayout.writes`): flat page-table indices, then the pages to write there
    ...       columns (`InboxLayout.rows`): the batch's slots, then the next position of each row

It stays valid from step to step: every step advances the positions of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxLayout:
    """Layout of the inbox."""

    writes: int
    """Maximum number of page writes."""
    rows: int
    """Maximum number of batch rows."""

    @property
    def table_indices(self) -> slice:
        """Return the slice of the flat page-table indices to write."""
        return slice(1, 1 + self.writes)

    @property
    def pages(self) -> slice:
        """Return the slice of the pages to write there."""
        return slice(1 + self.writes, 1 + 2 * self.writes)

    @property
    def slots(self) -> slice:
        """Return the slice of the rows' slots."""
        return slice(1 + 2 * self.writes, 1 + 2 * self.writes + self.rows)

    @property
    def positions(self) -> slice:
        """Return the slice of the rows' next positions."""
        return slice(self.slots.stop, self.size)

    @property
    def size(self) -> int:
        """Return the length of the inbox."""
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
    slots, positions, last_tokens, table, tokens, positions_out, slot_mapping, lengths, columns, rows,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
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


def write_pages(inbox: torch.Tensor, layout: InboxLayout, table: torch.Tensor) -> None:
    """Write the inbox's pages to the page table, int32 [slots, columns]."""
    grid = (triton.cdiv(layout.writes, BLOCK),)
    _write_pages_kernel[grid](inbox, table, WRITES=layout.writes, BLOCK=BLOCK, num_warps=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """Inputs of a decode batch, one element per row."""

    tokens: torch.Tensor
    """Input tokens, int64."""
    positions: torch.Tensor
    """Positions of the input tokens, int64."""
    slot_mapping: torch.Tensor
    """KV slots of the input tokens, int64."""
    lengths: torch.Tensor
    """Tokens whose KV each row reads, its own included, int32."""


def gather_inputs(
    slots: torch.Tensor,
    positions: torch.Tensor,
    last_tokens: torch.Tensor,
    table: torch.Tensor,
    page_size: int,
) -> DecodeInputs:
    """Gather the decode inputs of rows (slots, positions: int32 [rows]).

    `last_tokens` [slots] holds the last token of every slot; `table` is the page table, int32 [slots,
    columns].
    """
    rows = len(slots)
    tokens, positions_out, slot_mapping = torch.empty((3, rows), dtype=torch.int64, device=slots.device)
    lengths = torch.empty(rows, dtype=torch.int32, device=slots.device)
    _decode_inputs_kernel[(triton.cdiv(rows, BLOCK),)](
        slots, positions, last_tokens, table, tokens, positions_out, slot_mapping, lengths,
        table.shape[1], rows,
        PAGE=page_size, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return DecodeInputs(tokens=tokens, positions=positions_out, slot_mapping=slot_mapping, lengths=lengths)
