# SPDX-License-Identifier: Apache-2.0
"""Interface of the collective operations that the ranks of a model use within a step.

Every rank must call the same operations with the same shapes in the same order. On GPUs, operations are
enqueued on the current stream, so captured graphs contain them; on the CPU, they complete before they return.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist


class Collectives(Protocol):
    """Collective operations over the ranks of the tensor axis."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of x (contiguous) over ranks; may write the sum to x and return x."""
        ...

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor | None:
        """Add the sum of x over ranks to `residual` in place; return RMSNorm(residual), scaled by `weight`.

        All this is done by one kernel. If there is no such kernel, or it would be slower than separate ones,
        do nothing and return None. x and residual are [rows, size]; `weight` is [size].
        """
        ...

    def gather_columns(self, x: torch.Tensor, total: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the concatenation [rows, total] of all ranks' x [rows, shard], in `out` if given.

        Columns beyond `total` are padding of the last ranks and are dropped.
        """
        ...

    def allocate_logits_buffer(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate a rank-0 logits buffer [rows, columns], to which all ranks write their logits directly.

        Only on rank 0 does the returned tensor contain the logits of all ranks. The buffer is kept until
        `close`. Must not be called during graph capture.
        """
        ...

    def map_logits_shard(self, out: torch.Tensor, shard: slice) -> torch.Tensor | None:
        """Return the view of rank 0's memory to which this rank writes the columns `shard` of `out`.

        The view is [rows, shard] with strided rows. If `out` is not part of a rank-0 logits buffer, all ranks
        get None, and must use `gather_columns`.

        Args:
            out: Result tensor [rows, columns], which may be the first rows of a rank-0 logits buffer.
            shard: This rank's equal shard of the columns.
        """
        ...

    def wait_for_logits(self) -> None:
        """Make all ranks' writes to the logits buffer visible to rank 0.

        There must be an all-reduce between this call and the next writes.
        """
        ...

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite x (contiguous) with rank 0's values; there must be an all-reduce before the next call."""
        ...

    def lookup_rows(
        self, ids: torch.Tensor, table: torch.Tensor, shard: slice, total: int
    ) -> torch.Tensor | None:
        """Look up rows of a table that is sharded over the ranks.

        There must be an all-reduce between two calls.

        Args:
            ids: Ids to look up, int64 [rows].
            table: Rows of this rank, [any, columns], starting with the row of the id `shard.start`.
            shard: Ids whose rows this rank holds.
            total: Total number of ids over all ranks.

        Returns:
            The rows [rows, columns]. If the lookup is not supported, nothing is done, and the result is None.
        """
        ...

    def close(self) -> None:
        """Free all resources; no operation may be in flight."""
        ...


class NoPeerMemory:
    """Base class for ranks that cannot access each other's memory: logits buffers are plain memory."""

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
    """Collectives of a model on a single rank, which exchange nothing."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return x."""
        return x

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor | None:
        """Return None: with one rank, the norm needs no all-reduce."""
        return None

    def gather_columns(self, x: torch.Tensor, total: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return x; if `out` is given, copy x to `out` and return `out`."""
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
    """Collectives on the CPU, implemented with gloo."""

    def __init__(self, group: Any) -> None:
        """Run the operations in `group`, a `torch.distributed.ProcessGroupGloo`."""
        self.group: Any = group
        self.rank: int = group.rank()
        self.size: int = group.size()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over ranks in place, and return it."""
        self.group.allreduce([x]).wait()
        return x

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor | None:
        """Return None: gloo has no such operation."""
        return None

    def gather_columns(self, x: torch.Tensor, total: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Gather x of all ranks, then concatenate the columns."""
        blocks = torch.empty((self.size, *x.shape), dtype=x.dtype)
        self.group.allgather([list(blocks.unbind())], [x.contiguous()]).wait()
        return concatenate_columns(blocks, total, out)

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite x with rank 0's values."""
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
    """Return blocks [ranks, rows, shard] concatenated into [rows, total]; drop the columns beyond `total`."""
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
