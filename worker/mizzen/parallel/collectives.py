"""What the ranks of a model exchange inside a step, behind one small interface.

Every rank calls the same operations with the same shapes in the same order. All of them are enqueued on the
current stream (or done at once, on the CPU), so that captured graphs contain them.
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
        """Add the sum over ranks of x to `residual` in place and return that, RMS-normalised, in one kernel.

        None, and nothing done, where there is no such kernel or it does not pay. All are [rows, size],
        `weight` is [size].
        """
        ...

    def gather_columns(self, x: torch.Tensor, total: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Put the columns of all ranks side by side: [rows, share] each → [rows, total], into `out` if given.

        Columns beyond `total` are padding of the last ranks, and left out.
        """
        ...

    def allocate_logits_buffer(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate [rows, columns] in which rank 0 is to get what it alone needs: the logits.

        Not while a graph is captured; kept until `close`. What other ranks find there is nothing to go by.
        """
        ...

    def map_logits_shard(self, out: torch.Tensor, held: slice) -> torch.Tensor | None:
        """Return where this rank's columns `held` of `out` are to be written to, for rank 0 to have them.

        It is a view [rows, held] of rank 0's memory; its rows lie apart. None on all ranks where there is no
        such place: `gather_columns` does it then.

        Args:
            out: The first rows of a room; of anything else there is no place.
            held: This rank's equal share of the columns, by rank.
        """
        ...

    def wait_for_logits(self) -> None:
        """Let rank 0 have what all wrote to their places; all-reduces follow before they write again."""
        ...

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite x (contiguous) with rank 0's; all-reduces follow before the next call."""
        ...

    def lookup_rows(self, ids: torch.Tensor, table: torch.Tensor, held: slice, total: int) -> torch.Tensor | None:
        """Look up rows of a table of which each rank holds some; None, and nothing done, where it cannot.

        Args:
            ids: int64 [rows]; all-reduces follow before the next call.
            table: This rank's rows [any, columns], those of the ids `held` first.
            held: Which they are.
            total: Ids in all.

        Returns:
            [rows, columns].
        """
        ...

    def close(self) -> None:
        """Free what the operations hold; nothing is in flight any more."""
        ...


class NoPeerMemory:
    """What ranks do that reach no memory of one another."""

    def allocate_logits_buffer(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory that no other rank check_copies_arrive."""
        return torch.empty((rows, columns), dtype=dtype, device=device)

    def map_logits_shard(self, out: torch.Tensor, held: slice) -> torch.Tensor | None:
        """Return None: there is none."""
        return None

    def wait_for_logits(self) -> None:
        """Do nothing."""


class SingleRank(NoPeerMemory):
    """One rank: there is nobody to exchange anything with."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return x."""
        return x

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor | None:
        """Return None: the plain kernel does it."""
        return None

    def gather_columns(self, x: torch.Tensor, total: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return x, or `out` with its values."""
        return x if out is None else out.copy_(x)

    def broadcast(self, x: torch.Tensor) -> None:
        """Do nothing."""

    def lookup_rows(self, ids: torch.Tensor, table: torch.Tensor, held: slice, total: int) -> torch.Tensor | None:
        """Return None: the table is whole."""
        return None

    def close(self) -> None:
        """Do nothing."""


SINGLE_RANK = SingleRank()


class GlooCollectives(NoPeerMemory):
    """The operations on the CPU, by gloo."""

    def __init__(self, group: Any) -> None:
        """Take a `torch.distributed.ProcessGroupGloo`."""
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
        """Return None: there is no such operation."""
        return None

    def gather_columns(self, x: torch.Tensor, total: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Gather whole blocks, then put them side by side."""
        blocks = torch.empty((self.size, *x.shape), dtype=x.dtype)
        self.group.allgather([list(blocks.unbind())], [x.contiguous()]).wait()
        return concatenate_columns(blocks, total, out)

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite x with rank 0's."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.group.broadcast([x], options).wait()

    def lookup_rows(self, ids: torch.Tensor, table: torch.Tensor, held: slice, total: int) -> torch.Tensor | None:
        """Return None: there is no such operation."""
        return None

    def close(self) -> None:
        """Part from the others."""
        self.group = None


def concatenate_columns(blocks: torch.Tensor, total: int, out: torch.Tensor | None) -> torch.Tensor:
    """Put blocks [ranks, rows, share] side by side: [rows, total], without what is beyond `total`."""
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
