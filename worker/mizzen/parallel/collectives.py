"""Collective operations among the ranks of a model inside a step, behind one small interface.

Every rank calls the same operations with the same shapes in the same order. All operations are enqueued on
the current stream (or done at once, on the CPU), so captured graphs contain them.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist


class Collectives(Protocol):
    """Operations over the ranks of the tensor axis."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of x (contiguous); x itself may be overwritten and returned."""
        ...

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor | None:
        """Add the sum over ranks of x to `residual` in place, and return the RMS-normalised result, in one
        kernel.

        None, with nothing done, if no such kernel exists or it is slower. x and residual are [rows, size],
        `weight` is [size].
        """
        ...

    def gather_columns(self, x: torch.Tensor, total: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Concatenate the columns of all ranks: [rows, shard] each → [rows, total], into `out` if given.

        Columns beyond `total` are padding of the last ranks, and dropped.
        """
        ...

    def allocate_logits_buffer(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate a rank-0 logits buffer [rows, columns]: the other ranks write their logits straight into
        rank 0's.

        Must not be called during graph capture; the buffer is kept until `close`. The contents on other ranks
        are undefined.
        """
        ...

    def map_logits_shard(self, out: torch.Tensor, shard: slice) -> torch.Tensor | None:
        """Return the view of rank 0's memory to which this rank writes the columns `shard` of `out`.

        The view is [rows, shard] with strided rows. None on all ranks if `out` is not in a rank-0 logits
        buffer; `gather_columns` is used then.

        Args:
            out: The first rows of a rank-0 logits buffer, or any other tensor.
            shard: This rank's equal shard of the columns.
        """
        ...

    def wait_for_logits(self) -> None:
        """Make all ranks' writes to the logits buffer visible to rank 0; an all-reduce must precede the next
        writes."""
        ...

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite x (contiguous) with rank 0's; an all-reduce must precede the next call."""
        ...

    def lookup_rows(
        self, ids: torch.Tensor, table: torch.Tensor, shard: slice, total: int
    ) -> torch.Tensor | None:
        """Look up rows of a table that is sharded over the ranks; None, with nothing done, if it is not
        supported.

        Args:
            ids: int64 [rows]; an all-reduce must precede the next call.
            table: This rank's rows [any, columns], those of the ids `shard` first.
            shard: Ids of this rank.
            total: Number of ids of all ranks.

        Returns:
            [rows, columns].
        """
        ...

    def close(self) -> None:
        """Free the resources of the operations; nothing may be in flight."""
        ...


class NoPeerMemory:
    """The logits-buffer operations of ranks without access to one another's memory."""

    def allocate_logits_buffer(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate memory that no other rank accesses."""
        return torch.empty((rows, columns), dtype=dtype, device=device)

    def map_logits_shard(self, out: torch.Tensor, shard: slice) -> torch.Tensor | None:
        """Return None: other ranks cannot write to the buffer."""
        return None

    def wait_for_logits(self) -> None:
        """Do nothing."""


class SingleRank(NoPeerMemory):
    """The operations of a model on one rank: nothing is exchanged."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return x."""
        return x

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor | None:
        """Return None: the plain fused norm kernel is used."""
        return None

    def gather_columns(self, x: torch.Tensor, total: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return x, or `out` with its values."""
        return x if out is None else out.copy_(x)

    def broadcast(self, x: torch.Tensor) -> None:
        """Do nothing."""

    def lookup_rows(
        self, ids: torch.Tensor, table: torch.Tensor, shard: slice, total: int
    ) -> torch.Tensor | None:
        """Return None: the table is not sharded."""
        return None

    def close(self) -> None:
        """Do nothing."""


SINGLE_RANK = SingleRank()


class GlooCollectives(NoPeerMemory):
    """The operations on the CPU, by gloo."""

    def __init__(self, group: Any) -> None:
        """Use a `torch.distributed.ProcessGroupGloo`."""
        self.group: Any = group
        self.rank: int = group.rank()
        self.size: int = group.size()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over ranks, in place."""
        self.group.allreduce([x]).wait()
        return x

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor | None:
        """Return None: gloo has no such operation."""
        return None

    def gather_columns(self, x: torch.Tensor, total: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Gather the ranks' blocks, then concatenate their columns."""
        blocks = torch.empty((self.size, *x.shape), dtype=x.dtype)
        self.group.allgather([list(blocks.unbind())], [x.contiguous()]).wait()
        return concatenate_columns(blocks, total, out)

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite x with rank 0's."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.group.broadcast([x], options).wait()

    def lookup_rows(
        self, ids: torch.Tensor, table: torch.Tensor, shard: slice, total: int
    ) -> torch.Tensor | None:
        """Return None: gloo has no such operation."""
        return None

    def close(self) -> None:
        """Leave the process group."""
        self.group = None


def concatenate_columns(blocks: torch.Tensor, total: int, out: torch.Tensor | None) -> torch.Tensor:
    """Concatenate blocks [ranks, rows, shard] to [rows, total], without the columns beyond `total`."""
    ranks, rows, share = blocks.shape
    if out is None:
        out = torch.empty((rows, total), dtype=blocks.dtype, device=blocks.device)
    if total == ranks * share:
        out.view(rows, ranks, share).copy_(blocks.transpose(0, 1))
        return out
    for rank, block in enumerate(blocks.unbind()):
        width = min(share, total - rank * share)
        if width > 0:
            out[:, rank * share : rank * share + width].copy_(block[:, :width])
    return out
