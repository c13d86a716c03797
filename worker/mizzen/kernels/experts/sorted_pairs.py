# SPDX-License-Identifier: Apache-2.0
"""Pairs sorted by expert, for the kernel of many rows: without padding, in blocks of one expert each."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from mizzen.kernels.nvrtc import KernelSpec, launch, load_kernel, read_source

CHUNK = 1024
"""Pairs that a thread block sorts, and its threads."""
WARPS = CHUNK // 32
BLOCK_STEP = 16
"""Divisor of the sizes of all blocks but the last of an expert, and of their largest size."""
BLOCK_INTS = 8
"""Numbers of 32 bits that describe a block of pairs (`PairBlock` of sort_pairs.cu)."""
MAX_EXPERTS = 1024
"""Most experts of a rank for which the tables of the kernel fit in shared memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedPairs:
    """Pairs of this rank's experts, sorted by expert, and blocks of about equal size for each expert."""

    pairs: torch.Tensor
    """Pairs, int32 [all pairs]: in ascending order within an expert. Behind those of this rank's experts, the
    numbers are undefined."""
    blocks: torch.Tensor
    """Description of each block, int32 [largest number of blocks * BLOCK_INTS]."""
    count: torch.Tensor
    """Number of blocks, the first element of an int32 tensor."""
    block: int
    """Largest number of pairs of a block."""


@functools.cache
def kernel_specs(held: int) -> tuple[KernelSpec, KernelSpec]:
    """Return the specs of the kernels that count and place the pairs of `held` experts."""
    source, defines = read_source("experts/sort_pairs"), (("EXPERTS", held),)
    return (source, "count_pairs", defines), (source, "place_pairs", defines)


def shared_bytes(held: int) -> int:
    """Return the dynamic shared memory of a thread block of the kernel that places pairs, in bytes."""
    return 2 * WARPS * held


def sort_pairs(chosen: torch.Tensor, held: int, block: int) -> SortedPairs:
    """Sort the pairs of this rank's experts by expert, in two launches.

    Args:
        chosen: Experts of each token, int64 [tokens, per_token] (contiguous); pairs of experts outside
            [0, held) are left out.
        held: Number of experts that this rank holds, up to `MAX_EXPERTS`.
        block: Largest number of pairs of a block, a multiple of `BLOCK_STEP`.
    """
    pairs, device = chosen.numel(), chosen.device
    chunks = -(-pairs // CHUNK)
    # Counts of all chunks, then the number of blocks.
    counts = torch.empty(chunks * held + 1, dtype=torch.int32, device=device)
    total = counts[chunks * held :]
    placed = torch.empty(pairs, dtype=torch.int32, device=device)
    most = pairs // block + min(held, pairs)
    blocks = torch.empty(most * BLOCK_INTS, dtype=torch.int32, device=device)
    count, place = (load_kernel(*spec, device.index or 0) for spec in kernel_specs(held))
    launch(count, chunks, CHUNK, (chosen, counts, pairs))
    arguments = (chosen, counts, placed, blocks, total, pairs, block)
    launch(place, chunks, CHUNK, arguments, shared_bytes=shared_bytes(held))
    return SortedPairs(pairs=placed, blocks=blocks, count=total, block=block)
