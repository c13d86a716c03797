# SPDX-License-Identifier: Apache-2.0
"""Page indices of a batch as ragged lists (CSR layout), for kernels that do not read a page table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 1024
MIN_ROWS = 1024
"""Rows up to which one compiled kernel serves all batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageIndices:
    """Pages of the rows of a batch, as ragged lists; all tensors are int32."""

    indptr: torch.Tensor
    """Index in `indices` at which each row starts, followed by the index after the last row, [rows + 1]."""
    last_page_len: torch.Tensor
    """Number of tokens in each row's last page, [rows]."""
    indices: torch.Tensor
    """Pages of all rows, one row after another, [at least indptr[-1]]."""

    @classmethod
    def allocate(cls, rows: int, pages: int, device: torch.device) -> PageIndices:
        """Allocate lists for `rows` rows that have `pages` pages in total."""
        indptr, last_page_len, indices = (
            torch.empty(size, dtype=torch.int32, device=device) for size in (rows + 1, rows, pages)
        )
        return cls(indptr=indptr, last_page_len=last_page_len, indices=indices)

    def head(self, rows: int) -> PageIndices:
        """Return the lists of the first `rows` rows, as views of the same memory."""
        return PageIndices(
            indptr=self.indptr[: rows + 1], last_page_len=self.last_page_len[:rows], indices=self.indices
        )


@triton.jit(do_not_specialize=["slots", "lengths", "columns", "rows"])
def _list_pages_kernel(
    slots, lengths, table, starts, last, pages, columns, rows,
    PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    other = tl.arange(0, ROWS)
    counts = (tl.load(lengths + other, other < rows, 0) + PAGE - 1) // PAGE
    start = tl.sum(tl.where(other < row, counts, 0))
    length = tl.load(lengths + row)
    count = (length + PAGE - 1) // PAGE
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < count
    slot = tl.load(slots + row).to(tl.int64)
    tl.store(pages + start + column, tl.load(table + slot * columns + column, inside, 0), inside)
    if part == 0:
        tl.store(last + row, length - (count - 1) * PAGE)
        tl.store(starts + row, start)
        if row == rows - 1:
            tl.store(starts + rows, start + count)


def build_page_indices(
    slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, page_size: int, out: PageIndices
) -> None:
    """Write to `out` the pages that hold the first `lengths` tokens of each row.

    Args:
        slots: Row of the page table for each row of the batch, int32 [rows].
        lengths: Number of tokens of each row, at least 1, int32 [rows].
        table: Page table, int32 [slots, columns].
        page_size: Tokens per page.
        out: Lists for `rows` rows, with room for all their pages.
    """
    rows, columns = len(slots), table.shape[1]
    _list_pages_kernel[(rows, triton.cdiv(columns, BLOCK))](
        slots, lengths, table, out.indptr, out.last_page_len, out.indices, columns, rows,
        PAGE=page_size, ROWS=max(MIN_ROWS, triton.next_power_of_2(rows)), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
