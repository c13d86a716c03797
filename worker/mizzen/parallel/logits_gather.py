"""Rank-0 logits buffers: every rank writes its logits straight into rank 0's memory, where tokens are
sampled.

A rank's GEMM writes its columns over NVLink while it computes; a small kernel after it makes rank 0 wait for
the other ranks. Nothing is gathered or copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mizzen.parallel.p2p_memory import ALIGNMENT, PeerMemory, make_on_all_ranks, true_on_all_ranks

TRIAL_ROWS = (16, 1, 3)
TRIAL_SHARD = 64
"""Columns of each rank in the trial buffer."""


@dataclass(frozen=True, slots=True)
class LogitsBuffer:
    """One buffer on this rank and on rank 0, both [rows, columns]; on rank 0 they are the same tensor."""

    own: torch.Tensor
    """This rank's memory."""
    rank_0: torch.Tensor


def is_aligned_shard(columns: int, element: int, shard: slice, rank: int, ranks: int) -> bool:
    """Return whether `shard` is a rank's equal shard of the columns, with all shards aligned to 16 bytes.

    `element` is the size of an element in bytes. The result is the same on all ranks: if a vocabulary is
    padded, rank 0's shard is not an equal one, and all other shards start elsewhere.
    """
    share = columns // ranks
    equal = share * ranks == columns and shard == slice(rank * share, (rank + 1) * share)
    return equal and share * element % ALIGNMENT == 0


class LogitsBuffers:
    """The logits buffers of a group, and the barrier that tells rank 0 that they are complete."""

    def __init__(self, memory: PeerMemory) -> None:
        """Make the barrier kernel; all ranks do so together.

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
        """Buffers by the address of this rank's memory."""

    def allocate(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate a buffer of zeros; None, with a warning, if any rank cannot. All ranks do so together."""
        pair = make_on_all_ranks(
            self.memory,
            "logits are gathered, and not written to peer memory",
            lambda memory: memory.allocate_matrix(rows, columns, dtype),
        )
        if pair is None:
            return None
        buffer = LogitsBuffer(*pair)
        self.by_address[buffer.own.data_ptr()] = buffer
        return buffer.own

    def map_shard(self, out: torch.Tensor, shard: slice) -> torch.Tensor | None:
        """Return the columns `shard` of rank 0's memory for `out`; see `Collectives.map_logits_shard`."""
        buffer = self.by_address.get(out.data_ptr())
        if buffer is None or out.shape[1:] != buffer.own.shape[1:] or len(out) > len(buffer.own):
            return None
        if not is_aligned_shard(out.shape[1], out.element_size(), shard, self.rank, self.size):
            return None
        return buffer.rank_0[: len(out), shard]


def make_logits_buffers(memory: PeerMemory) -> LogitsBuffers | None:
    """Make and check the logits buffers; None, with a warning, if any rank cannot make them or finds them
    wrong."""
    return make_on_all_ranks(
        memory, "logits are gathered, and not written to peer memory", LogitsBuffers, check_writes_arrive
    )


def check_writes_arrive(buffers: LogitsBuffers) -> bool:
    """Return whether rank 0 sees the writes of all ranks to a buffer, by GEMMs and copies, several times in a
    row.

    Every rank runs all checks whatever their results, as in `mizzen.parallel.p2p_memory.check_sums`, and gets
    the same answer.
    """
    memory, columns = buffers.memory, TRIAL_SHARD * buffers.size
    buffer = buffers.allocate(max(TRIAL_ROWS), columns, torch.bfloat16)
    if buffer is None:
        return False
    shard = slice(buffers.rank * TRIAL_SHARD, (buffers.rank + 1) * TRIAL_SHARD)
    correct, shift = True, 0
    for rows in TRIAL_ROWS:
        for multiply in (True, False):
            # Integers that bfloat16 represents exactly, different in every position from those of the last
            # trial.
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
    """Write this rank's columns of `expected` to rank 0's memory for `out`; return whether that is possible.

    With `multiply`, a GEMM writes them, otherwise a copy.
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
    except RuntimeError:  # return nevertheless: the other ranks wait for this one
        return False
    return True
