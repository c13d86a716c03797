"""Cuts the contexts of a batch of decodes by their lengths, on the device, for `mizzen.kernels.attention.flash_decode_mma`.

A plain cut has as many parts of every row, so that one long row beside many short ones is what a step waits
for. Here a row of more than twice the tokens that its blocks should have is cut into parts of that many; all
others stay as the plain cut has them.

The plan is a list, int32 [items, 4], one item for each block of a KV head, in the order in which blocks
begin; those of long rows stand first, for one that began last would end alone (Graham 1969):

    row       -1 where the item is not used: those stand behind all others
    part      which one of the row
    parts     how many the row has; those of a row stand together
    place     number of the row's first partial result; rows of one part have none
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from mizzen.core.request import Int32, Int64
from mizzen.kernels.attention.flash_decode_mma import MOST, cut_of

MIN_PART = 256
"""Tokens of a part at least, where a row has more than in a plain cut."""
ENDLESS = 2**31 - 1
"""The window of a layer that has none."""
ROWS = 1024
"""Rows that the kernel is compiled for at least: one compilation serves almost all batches."""
BLOCK = 256


@dataclass(frozen=True, slots=True)
class Cut:
    """How a batch of so many rows may be cut.

    A row is long where its tokens are more than `2 * parts * share`; it gets ceil(tokens / share) parts, and
    `MOST` at most. As `share` is `total / shares` or more, all long rows together have less than `shares`
    parts and one for each of them, which `rows * parts` has already: `items` suffice, whatever the lengths.

    Of rows of equal length that fill the batch none is long: `2 * parts * rows` is `shares` or more, for
    `cut_of` rounds a quotient of at least 1 down, or has one part where there are more pairs of a row and a
    KV head than blocks that run at once. (Where it takes `MOST` parts, no row can have more.)
    """

    rows: int
    parts: int
    """Of a row that is not long."""
    warps: int
    shares: int
    """Blocks that run at once for each KV head."""

    @property
    def items(self) -> int:
        """Items of a plan."""
        return self.rows * self.parts + self.shares


@functools.cache
def make_schedule(rows: int, kv_heads: int, processors: int, resident: int) -> Cut:
    """Return how rows are cut on so many multiprocessors, each of which holds `resident` small blocks."""
    parts, warps = cut_of(rows * kv_heads, processors, resident)
    slots = processors * (resident if warps == 4 else 1)
    return Cut(rows, parts, warps, max(1, slots // kv_heads))


def max_partial_results(kv_heads: int, processors: int, resident: int) -> int:
    """Return how many partial results the plans of any batch have at most, those of all KV heads.

    Where the plain cut has several parts, its blocks run all at once, and long rows add `shares` at most.
    Otherwise long rows alone have some, of more than two shares each: rounding adds half of that at most.
    """
    return 2 * max(processors * resident, kv_heads)


def share_of(total: int, shares: int) -> int:
    """Return how many tokens a part of a long row has, with so many in the whole batch."""
    return max(-(-total // shares), MIN_PART)


def pays(lengths: Int32, window: int | None, cut: Cut) -> bool:
    """Tell whether a batch has long rows."""
    seen = window or ENDLESS
    longest = min(int(lengths.max()), seen)
    if longest <= 2 * cut.parts * MIN_PART:
        return False
    return longest > 2 * cut.parts * share_of(int(np.minimum(lengths, seen).sum()), cut.shares)


def parts_of(lengths: Int32, window: int | None, cut: Cut) -> tuple[Int64, NDArray[np.bool_]]:
    """Return how many parts each row gets, and which rows are long."""
    seen = np.minimum(lengths, window or ENDLESS).astype(np.int64)
    share = share_of(int(seen.sum()), cut.shares)
    long = seen > 2 * cut.parts * share
    return np.where(long, np.minimum(-(-seen // share), MOST), cut.parts), long


def planned(lengths: Int32, window: int | None, cut: Cut) -> Int32:
    """Return the plan, as the kernel makes it."""
    items = np.full((cut.items, 4), -1, np.int32)
    parts, long = parts_of(lengths, window, cut)
    ahead, behind = np.where(long, parts, 0), np.where(long, 0, parts)
    begin = np.where(long, ahead.cumsum(), ahead.sum() + behind.cumsum()) - parts
    split = np.where(parts > 1, parts, 0)
    place = split.cumsum() - split
    for row, count in enumerate(parts.tolist()):
        for part in range(count):
            items[begin[row] + part] = row, part, count, place[row]
    return items


@triton.jit(do_not_specialize=["rows", "count", "plain", "shares", "window"])
def _plan_kernel(
    lengths, items, rows, count, plain, shares, window,
    MOST: tl.constexpr, MIN_PART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    inside = row < rows
    seen = tl.minimum(tl.load(lengths + row, inside, 0), window).to(tl.int64)
    share = tl.maximum((tl.sum(seen, 0) + shares - 1) // shares, MIN_PART)
    long = seen > 2 * plain * share
    parts = tl.where(long, tl.minimum((seen + share - 1) // share, MOST), plain)
    parts = tl.where(inside, parts, 0).to(tl.int32)
    ahead, behind = tl.where(long, parts, 0), tl.where(long, 0, parts)
    begin = tl.where(long, tl.cumsum(ahead, 0), tl.sum(ahead, 0) + tl.cumsum(behind, 0)) - parts
    split = tl.where(parts > 1, parts, 0)
    place = tl.cumsum(split, 0) - split
    for part in range(tl.max(parts, 0)):
        index = begin + part
        real = (part < parts) & (index < count)
        at = items + 4 * index
        tl.store(at, row, real)
        tl.store(at + 1, part, real)
        tl.store(at + 2, parts, real)
        tl.store(at + 3, place, real)
    for start in range(tl.sum(parts, 0), count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        tl.store(items + 4 * index, -1, index < count)


def plan(lengths: torch.Tensor, window: int | None, cut: Cut) -> torch.Tensor:
    """Make the plan of lengths (int32 [rows]) that only the device knows; may be captured in a graph.

    It is launched without overlap, so that what follows finds it there before it waits for anything.
    """
    items = torch.empty((cut.items, 4), dtype=torch.int32, device=lengths.device)
    _plan_kernel[(1,)](
        lengths, items, cut.rows, cut.items, cut.parts, cut.shares, window or ENDLESS,
        MOST=MOST, MIN_PART=MIN_PART, ROWS=max(ROWS, triton.next_power_of_2(cut.rows)), BLOCK=BLOCK,
        num_warps=8,
    )  # fmt: skip
    return items
