# SPDX-License-Identifier: Apache-2.0
"""Alignment of pairs for grouped GEMMs: sorted by expert, and padded so that each block has one expert.

All shapes are those of the worst case, so that a CUDA graph can capture the kernels that work on the blocks;
unused blocks come last, and kernels skip them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mizzen.kernels.launch import pdl_launch_options

CHUNK = 1024
"""Number of pairs that a program reads at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedPairs:
    """Pairs sorted by expert, in blocks of one expert each."""

    pairs: torch.Tensor
    """Pairs, int32 [blocks * block]: in ascending order within an expert, and -1 as padding behind them."""
    experts: torch.Tensor
    """Expert of each block, int32 [blocks]; -1 for unused blocks, which come last."""
    block: int
    """Number of pairs in a block."""


@triton.jit(do_not_specialize=["count", "capacity"])
def _align_kernel(
    chosen, pairs, block_experts, count, capacity,
    HELD: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the blocks of one expert; the program behind those of all experts marks the unused blocks."""
    expert = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    bins, at = tl.arange(0, BINS), tl.arange(0, CHUNK)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, count, CHUNK):
        found = tl.load(chosen + start + at, start + at < count, -1).to(tl.int32)
        held = (found >= 0) & (found < HELD)
        counts += tl.histogram(tl.where(held, found, HELD), BINS)
    blocks = tl.where(bins < HELD, (counts + BLOCK - 1) // BLOCK, 0)
    first = tl.sum(tl.where(bins < expert, blocks, 0), 0)
    if expert == HELD:
        for start in range(first, capacity, CHUNK):
            tl.store(block_experts + start + at, tl.full((CHUNK,), -1, tl.int32), start + at < capacity)
        return
    own_pairs = tl.sum(tl.where(bins == expert, counts, 0), 0)
    own_blocks = (own_pairs + BLOCK - 1) // BLOCK
    for start in range(0, own_blocks, CHUNK):
        own = tl.full((CHUNK,), 0, tl.int32) + expert
        tl.store(block_experts + first + start + at, own, start + at < own_blocks)
    written = first * BLOCK
    for start in range(0, count, CHUNK):
        found = tl.load(chosen + start + at, start + at < count, -1).to(tl.int32)
        own = found == expert
        place = written + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(pairs + place, (start + at).to(tl.int32), own)
        written += tl.sum(own.to(tl.int32), 0)
    padding = tl.arange(0, BLOCK)
    end = (first + own_blocks) * BLOCK
    tl.store(pairs + written + padding, tl.full((BLOCK,), -1, tl.int32), written + padding < end)


def max_blocks(pairs: int, held: int, block: int) -> int:
    """Return the maximum number of blocks of `block` pairs, however `pairs` pairs choose `held` experts."""
    return max(1, (pairs + min(held, pairs) * (block - 1)) // block)


def align_pairs(chosen: torch.Tensor, held: int, block: int) -> AlignedPairs:
    """Sort the pairs of this rank's experts by expert, into blocks of one expert each, in one launch.

    Args:
        chosen: Experts of each token, int64 [tokens, per_token] (contiguous); pairs of experts outside
            [0, held) are in no block.
        held: Number of experts that this rank holds.
        block: Number of pairs in a block, a power of two.
    """
    count, device = chosen.numel(), chosen.device
    blocks = max_blocks(count, held, block)
    pairs = torch.empty(blocks * block, dtype=torch.int32, device=device)
    experts = torch.empty(blocks, dtype=torch.int32, device=device)
    _align_kernel[(held + 1,)](
        chosen, pairs, experts, count, blocks,
        HELD=held, BINS=triton.next_power_of_2(held + 1), BLOCK=block, CHUNK=CHUNK,
        num_warps=4, **pdl_launch_options(chosen),
    )  # fmt: skip
    return AlignedPairs(pairs=pairs, experts=experts, block=block)
