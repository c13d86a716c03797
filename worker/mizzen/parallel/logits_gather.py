# SPDX-License-Identifier: Apache-2.0
"""Rank-0 logits buffers: every rank writes its logits straight into the memory of rank 0, which samples.

The GEMM of each rank writes its columns over NVLink while it computes; a small kernel after it makes rank 0
wait for the other ranks. So logits need not be gathered or copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mizzen.parallel.p2p_memory import ALIGNMENT, PeerMemory, make_on_all_ranks, true_on_all_ranks

TRIAL_ROWS = (16, 1, 3)
TRIAL_SHARD = 64
"""Number of columns that each rank writes to the buffer of `check_writes_arrive`."""


@dataclass(frozen=True, slots=True)
class LogitsBuffer:
    """A logits buffer: two tensors [rows, columns], which on rank 0 share the same memory."""

    own: torch.Tensor
    """Tensor in this rank's memory."""
    rank_0: torch.Tensor
    """View of rank 0's memory."""


def is_aligned_shard(columns: int, element: int, shard: slice, rank: int, ranks: int) -> bool:
    """Return whether `shard` is this rank's equal part of `columns`, and all parts are aligned to 16 bytes.

    `element` is the size of an element in bytes. All ranks get the same result. If the vocabulary is padded,
    the result is False: rank 0's shard is larger than an equal part, so all other shards start later.
    """
    share = columns // ranks
    equal = share * ranks == columns and shard == slice(rank * share, (rank + 1) * share)
    return equal and share * element % ALIGNMENT == 0


class LogitsBuffers:
    """All logits buffers of a group, and the barrier that makes rank 0 wait for complete logits."""

    def __init__(self, memory: PeerMemory) -> None:
        """Make the barrier kernel; all ranks must call this together.

        Raises:
            RuntimeError: the kernel cannot be compiled, or its memory cannot be allocated.
        """
        from mizzen.kernels.comm.peer_broadcast import WriteBarrier

        self.memory = memory
        self.rank, self.size = memory.group.rank(), memory.group.size()
        region, addresses = memory.allocate_region(WriteBarrier.region_bytes(self.size))
        self.wait_for_writes = WriteBarrier(addresses, self.rank, memory.device)
        self.wait_for_writes.region = region
        self.by_address: dict[int, LogitsBuffer] = {}
        """Buffers by the address of their tensor in this rank's memory."""

    def allocate(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate a buffer of zeros, and return this rank's tensor; all ranks must call this together.

        Log a warning and return None if any rank cannot allocate it.
        """
        pair = make_on_all_ranks(
            self.memory,
            "logits fall back to a gather without peer memory",
            lambda memory: memory.allocate_matrix(rows, columns, dtype),
        )
        if pair is None:
            return None
        buffer = LogitsBuffer(*pair)
        self.by_address[buffer.own.data_ptr()] = buffer
        return buffer.own

    def map_shard(self, out: torch.Tensor, shard: slice) -> torch.Tensor | None:
        """Return a view of the columns `shard` in rank 0's memory; see `Collectives.map_logits_shard`."""
        buffer = self.by_address.get(out.data_ptr())
        if buffer is None or out.shape[1:] != buffer.own.shape[1:] or len(out) > len(buffer.own):
            return None
        if not is_aligned_shard(out.shape[1], out.element_size(), shard, self.rank, self.size):
            return None
        return buffer.rank_0[: len(out), shard]


def make_logits_buffers(memory: PeerMemory) -> LogitsBuffers | None:
    """Make and check the logits buffers of a group.

    Log a warning and return None if any rank cannot make them, or if a check fails.
    """
    return make_on_all_ranks(
        memory, "logits fall back to a gather without peer memory", LogitsBuffers, check_writes_arrive
    )


def check_writes_arrive(buffers: LogitsBuffers) -> bool:
    """Run several trials, in which all ranks write to a buffer; return whether all values reached rank 0.

    In half of the trials, a GEMM writes the values; in the others, they are copied.

    Every rank runs all checks whatever their results, so that no rank waits for a rank that stopped early.
    All ranks get the same result.
    """
    memory, columns = buffers.memory, TRIAL_SHARD * buffers.size
    buffer = buffers.allocate(max(TRIAL_ROWS), columns, torch.bfloat16)
    if buffer is None:
        return False
    shard = slice(buffers.rank * TRIAL_SHARD, (buffers.rank + 1) * TRIAL_SHARD)
    correct, shift = True, 0
    for rows in TRIAL_ROWS:
        for multiply in (True, False):
            # Integers that bfloat16 represents exactly; every position has a new value in each trial.
            shift += 7
            numbers = torch.arange(rows * columns, device=memory.device).view(rows, columns)
            expected = ((numbers + shift) % 251).to(torch.bfloat16)
            correct = write_trial(buffers, buffer[:rows], shard, expected, multiply) and correct
            buffers.wait_for_writes()
            equal = buffers.rank != 0 or torch.equal(buffer[:rows], expected)
            correct = true_on_all_ranks(equal and correct, memory.group, memory.device)
    buffers.by_address.clear()
    return correct


def write_trial(
    buffers: LogitsBuffers, out: torch.Tensor, shard: slice, expected: torch.Tensor, multiply: bool
) -> bool:
    """Write this rank's columns of `expected` to rank 0's memory for `out`; return whether that succeeded.

    With `multiply`, a GEMM writes the columns; otherwise, they are copied.
    """
    rank_0_shard = buffers.map_shard(out, shard)
    if rank_0_shard is None:
        return False
    if not multiply:
        rank_0_shard.copy_(expected[:, shard])
        return True
    weight = expected[:, shard].t().contiguous()
    try:
        torch.mm(torch.eye(len(out), dtype=weight.dtype, device=weight.device), weight.t(), out=rank_0_shard)
    except RuntimeError:  # do not raise: the other ranks wait for this one
        return False
    return True
