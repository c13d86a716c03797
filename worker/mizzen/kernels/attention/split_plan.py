# SPDX-License-Identifier: Apache-2.0
"""Length-aware splits of a decode batch, planned on the device.

The splits are used by `mizzen.kernels.attention.flash_decode_mma`.

Equal splits give every row the same number of splits, so one long row among many short ones delays the step.
Here, a row is long if its equal splits would have more than twice `tokens_per_split` tokens each. A long row
gets splits of about `tokens_per_split` tokens instead; all other rows keep the equal splits.

The plan is a tensor, int32 [items, 4], with one item for each block that works on a KV head, in the order in
which blocks start; all KV heads share the plan. Long rows come first: if a block of a long row started last,
it would still be running after all others had ended (Graham 1969). An item consists of:

    row              row of the batch; -1 if the item is unused, and unused items come last
    split            index of the split in its row
    splits           number of splits of the row, whose items are adjacent
    first_partial    number of the row's first partial result; unused if the row has one split
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
from mizzen.kernels.attention.flash_decode_mma import MAX_SPLITS, select_splits

MIN_SPLIT_TOKENS = 256
"""Minimum number of tokens per split of a long row."""
NO_WINDOW = 2**31 - 1
"""Number of tokens that stands for the window of a layer without a sliding window."""
MIN_COMPILED_ROWS = 1024
"""Minimum number of rows for which the kernel is compiled. Smaller batches run the same compiled kernel, so
one compilation serves almost all batches."""
BLOCK = 256


@dataclass(frozen=True, slots=True)
class SplitSchedule:
    """Parameters for planning length-aware splits; they depend on the number of rows, not on rows' lengths.

    A row is long if it has more than `2 * splits * t` tokens, where t is `tokens_per_split`. A long row gets
    ceil(tokens / t) splits, but at most `MAX_SPLITS`.

    A plan of `items` items is large enough for any lengths: t is at least the batch's number of tokens
    divided by `concurrent_blocks`. So without rounding up, all long rows together would have at most
    `concurrent_blocks` splits; rounding up adds at most one split per long row. `items` equals
    `concurrent_blocks + rows * splits`. As the second term counts long rows too, it covers the splits that
    rounding up adds.

    If all rows have equal lengths, no row is long, because `2 * splits * rows` is at least
    `concurrent_blocks`. The reason is how `select_splits` chooses `splits`: it divides the number of
    concurrent blocks by the number of pairs of a row and a KV head, and rounds down; with more pairs than
    blocks, it uses one split. (If it chooses `MAX_SPLITS`, no row can have more splits.)
    """

    rows: int
    splits: int
    """Number of splits of a row that is not long."""
    warps: int
    """Number of warps per block."""
    concurrent_blocks: int
    """Number of blocks per KV head that the GPU runs at once."""

    @property
    def items(self) -> int:
        """Number of items in a plan, including unused ones."""
        return self.rows * self.splits + self.concurrent_blocks


@functools.cache
def make_schedule(rows: int, kv_heads: int, sm_count: int, blocks_per_sm: int) -> SplitSchedule:
    """Return the schedule for a GPU with `sm_count` SMs that hold `blocks_per_sm` four-warp blocks each."""
    splits, warps = select_splits(rows * kv_heads, sm_count, blocks_per_sm)
    slots = sm_count * (blocks_per_sm if warps == 4 else 1)
    return SplitSchedule(rows, splits, warps, max(1, slots // kv_heads))


def max_partial_results(kv_heads: int, sm_count: int, blocks_per_sm: int) -> int:
    """Return the maximum number of partial results of any batch's plan, over all KV heads.

    If equal splits give each row several splits, all their blocks run at once, and long rows add at most
    `concurrent_blocks` per KV head. Otherwise only long rows have partial results; each long row has more
    than twice `tokens_per_split` tokens, so rounding up increases its number of splits by at most half.
    """
    return 2 * max(sm_count * blocks_per_sm, kv_heads)


def tokens_per_split(total: int, concurrent_blocks: int) -> int:
    """Return the number of tokens per split of a long row, in a batch of `total` tokens."""
    return max(-(-total // concurrent_blocks), MIN_SPLIT_TOKENS)


def is_faster(lengths: Int32, window: int | None, schedule: SplitSchedule) -> bool:
    """Return whether length-aware splits are faster than equal ones, that is, whether a row is long.

    `lengths` is int32 [at most rows]; `window` is the sliding window in tokens, or None.
    """
    seen = window or NO_WINDOW
    longest = min(int(lengths.max()), seen)
    if longest <= 2 * schedule.splits * MIN_SPLIT_TOKENS:
        return False
    total = int(np.minimum(lengths, seen).sum())
    return longest > 2 * schedule.splits * tokens_per_split(total, schedule.concurrent_blocks)


def splits_by_row(
    lengths: Int32, window: int | None, schedule: SplitSchedule
) -> tuple[Int64, NDArray[np.bool_]]:
    """Return how many splits each row has, int64 [rows], and which rows are long, bool [rows]."""
    seen = np.minimum(lengths, window or NO_WINDOW).astype(np.int64)
    split_tokens = tokens_per_split(int(seen.sum()), schedule.concurrent_blocks)
    long = seen > 2 * schedule.splits * split_tokens
    return np.where(long, np.minimum(-(-seen // split_tokens), MAX_SPLITS), schedule.splits), long


def plan_reference(lengths: Int32, window: int | None, schedule: SplitSchedule) -> Int32:
    """Compute the plan of `plan_splits` on the host, int32 [items, 4]; tests compare the kernel with it."""
    items = np.full((schedule.items, 4), -1, np.int32)
    splits, long = splits_by_row(lengths, window, schedule)
    long_splits, short_splits = np.where(long, splits, 0), np.where(long, 0, splits)
    begin = np.where(long, long_splits.cumsum(), long_splits.sum() + short_splits.cumsum()) - splits
    partials = np.where(splits > 1, splits, 0)
    first_partial = partials.cumsum() - partials
    for row, count in enumerate(splits.tolist()):
        for split in range(count):
            items[begin[row] + split] = row, split, count, first_partial[row]
    return items


@triton.jit(do_not_specialize=["rows", "count", "equal_splits", "concurrent_blocks", "window"])
def _plan_kernel(
    lengths, items, rows, count, equal_splits, concurrent_blocks, window,
    MAX_SPLITS: tl.constexpr, MIN_SPLIT_TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    inside = row < rows
    seen = tl.minimum(tl.load(lengths + row, inside, 0), window).to(tl.int64)
    split_tokens = tl.maximum(
        (tl.sum(seen, 0) + concurrent_blocks - 1) // concurrent_blocks, MIN_SPLIT_TOKENS
    )
    long = seen > 2 * equal_splits * split_tokens
    splits = tl.where(long, tl.minimum((seen + split_tokens - 1) // split_tokens, MAX_SPLITS), equal_splits)
    splits = tl.where(inside, splits, 0).to(tl.int32)
    long_splits, short_splits = tl.where(long, splits, 0), tl.where(long, 0, splits)
    begin = (
        tl.where(long, tl.cumsum(long_splits, 0), tl.sum(long_splits, 0) + tl.cumsum(short_splits, 0))
        - splits
    )
    partials = tl.where(splits > 1, splits, 0)
    first_partial = tl.cumsum(partials, 0) - partials
    for split in range(tl.max(splits, 0)):
        index = begin + split
        real = (split < splits) & (index < count)
        at = items + 4 * index
        tl.store(at, row, real)
        tl.store(at + 1, split, real)
        tl.store(at + 2, splits, real)
        tl.store(at + 3, first_partial, real)
    for start in range(tl.sum(splits, 0), count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        tl.store(items + 4 * index, -1, index < count)


def plan_splits(lengths: torch.Tensor, window: int | None, schedule: SplitSchedule) -> torch.Tensor:
    """Plan the splits on the device from `lengths` (int32 [rows]); return the plan, int32 [items, 4].

    May be captured in a CUDA graph. The kernel never triggers PDL, so no later kernel starts before the plan
    is complete, and later kernels may read it before their own PDL wait.
    """
    items = torch.empty((schedule.items, 4), dtype=torch.int32, device=lengths.device)
    _plan_kernel[(1,)](
        lengths, items, schedule.rows, schedule.items, schedule.splits, schedule.concurrent_blocks,
        window or NO_WINDOW, MAX_SPLITS=MAX_SPLITS, MIN_SPLIT_TOKENS=MIN_SPLIT_TOKENS,
        ROWS=max(MIN_COMPILED_ROWS, triton.next_power_of_2(schedule.rows)), BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return items
