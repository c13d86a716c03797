"""What a decode step reads and updates on the device, so that the host has nothing to send.

The host's word to a step is one int32 buffer, the inbox:

    0         number of page writes
    1         columns (`InboxLayout.writes`): flat page-table cells, then the pages that go there
    ...       columns (`InboxLayout.rows`): the batch's slots, then the position that each row runs next

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
    """Where things stand in the inbox."""

    writes: int
    """Page writes that fit."""
    rows: int
    """Batch rows that fit."""

    @property
    def table_indices(self) -> slice:
        """Flat page-table cells to write."""
        return slice(1, 1 + self.writes)

    @property
    def pages(self) -> slice:
        """The pages that go there."""
        return slice(1 + self.writes, 1 + 2 * self.writes)

    @property
    def slots(self) -> slice:
        """Each row's slot."""
        return slice(1 + 2 * self.writes, 1 + 2 * self.writes + self.rows)

    @property
    def positions(self) -> slice:
        """The position that each row runs next."""
        return slice(self.slots.stop, self.size)

    @property
    def size(self) -> int:
        """Numbers in all."""
        return 1 + 2 * self.writes + 2 * self.rows


@triton.jit
def _write_pages_kernel(inbox, table, WRITES: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = index < tl.load(inbox)
    cells = tl.load(inbox + 1 + index, wanted, 0)
    pages = tl.load(inbox + 1 + WRITES + index, wanted, 0)
    tl.store(table + cells, pages, wanted)


@triton.jit
def _decode_inputs_kernel(
    slots, positions, last_tokens, table, tokens, positions_out, cells, lengths, columns, rows,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    slot = tl.load(slots + row, inside, 0).to(tl.int64)
    position = tl.load(positions + row, inside, 0)
    page = tl.load(table + slot * columns + position // PAGE, inside, 0).to(tl.int64)
    tl.store(tokens + row, tl.load(last_tokens + slot, inside, 0), inside)
    tl.store(positions_out + row, position.to(tl.int64), inside)
    tl.store(cells + row, page * PAGE + position % PAGE, inside)
    tl.store(lengths + row, position + 1, inside)


def write_pages(inbox: torch.Tensor, layout: InboxLayout, table: torch.Tensor) -> None:
    """Write the inbox's pages to the page table, int32 [slots, columns]."""
    grid = (triton.cdiv(layout.writes, BLOCK),)
    _write_pages_kernel[grid](inbox, table, WRITES=layout.writes, BLOCK=BLOCK, num_warps=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """A decode batch, by row."""

    tokens: torch.Tensor
    """int64, the token to run."""
    positions: torch.Tensor
    """int64, its position."""
    slot_mapping: torch.Tensor
    """int64, where its KV goes."""
    lengths: torch.Tensor
    """int32, tokens whose KV it reads, its own included."""


def gather_inputs(
    slots: torch.Tensor,
    positions: torch.Tensor,
    last_tokens: torch.Tensor,
    table: torch.Tensor,
    page_size: int,
) -> DecodeInputs:
    """Look up what rows (slots, positions: int32 [rows]) run, from last tokens [slots] and page table."""
    rows = len(slots)
    tokens, where, cells = torch.empty((3, rows), dtype=torch.int64, device=slots.device)
    lengths = torch.empty(rows, dtype=torch.int32, device=slots.device)
    _decode_inputs_kernel[(triton.cdiv(rows, BLOCK),)](
        slots, positions, last_tokens, table, tokens, where, cells, lengths, table.shape[1], rows,
        PAGE=page_size, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return DecodeInputs(tokens=tokens, positions=where, slot_mapping=slot_mapping, lengths=lengths)
