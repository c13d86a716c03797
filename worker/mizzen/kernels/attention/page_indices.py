"""Lists of pages one row after the other, as kernels take them that know no page table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PageIndices:
    """The pages of a batch's rows, int32."""

    starts: torch.Tensor
    """[rows + 1], where each row's pages begin in `pages`; the last is where they end."""
    last: torch.Tensor
    """[rows], tokens in each row's last page."""
    pages: torch.Tensor
    """[at least starts[-1]]."""

    @classmethod
    def allocate(cls, rows: int, pages: int, device: torch.device) -> PageIndices:
        """Allocate lists for so many rows and pages in all."""
        starts, last, listed = (
            torch.empty(size, dtype=torch.int32, device=device) for size in (rows + 1, rows, pages)
        )
        return cls(starts=starts, last=last, pages=listed)

    def head(self, rows: int) -> PageIndices:
        """Return lists of the first rows, in the same memory."""
        return PageIndices(starts=self.starts[: rows + 1], last=self.last[:rows], pages=self.pages)


@triton.jit
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
    slots: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, page_size: int, into: PageIndices
) -> None:
    """List the pages that hold the first `lengths` (1 at least) tokens of rows.

    Args:
        slots: int32 [rows], rows of the page table.
        lengths: int32 [rows].
        table: int32 [slots, columns].
        page_size: tokens in a page.
        into: of as many rows, with room for the pages.
    """
    rows, columns = len(slots), table.shape[1]
    _list_pages_kernel[(rows, triton.cdiv(columns, BLOCK))](
        slots, lengths, table, into.starts, into.last, into.pages, columns, rows,
        PAGE=page_size, ROWS=triton.next_power_of_2(rows), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
