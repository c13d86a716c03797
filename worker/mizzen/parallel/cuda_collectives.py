# SPDX-License-Identifier: Apache-2.0
"""Collectives on CUDA: peer memory (P2P over NVLink) for small messages, NCCL for large ones.

In a one-shot all-reduce, each rank reads the whole message of every rank; this method has the lowest latency.
In a two-shot all-reduce, each rank reduces a shard and then gathers the shards; with four or more ranks, this
method moves the fewest bytes. All operations may be captured in graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mizzen.parallel.collectives import NoPeerMemory, concatenate_columns
from mizzen.parallel.logits_gather import LogitsBuffers, make_logits_buffers
from mizzen.parallel.p2p_memory import (
    ALIGNMENT,
    BUFFER_BYTES,
    PeerMemory,
    make_on_all_ranks,
    make_peer_memory,
)
from mizzen.parallel.p2p_setup import (
    MAX_BROADCAST_TOKENS,
    MAX_LOOKUP_ROWS,
    make_row_lookup,
    make_token_broadcast,
)

# Newer releases of PyTorch rename this function.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


KIB = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceSizes:
    """Maximum message size in bytes for each all-reduce method; NCCL handles larger messages.

    The methods whose names begin with `fused` also add to the residual and apply the norm.
    """

    one_shot: int = 0
    two_shot: int = 0
    fused_push: int = 0
    """Maximum message size in bytes for the fused method by which each rank sends its rows to all others."""
    fused_read: int = 0
    """Maximum message size in bytes for the fused method by which each rank reads the rows of all others."""
    fused_two_shot: int = 0
    """Maximum message size in bytes for the fused method by which each rank reduces a shard of the rows."""

    @property
    def max_fused_bytes(self) -> int:
        """Size in bytes of the largest message that a fused method handles."""
        return max(self.fused_push, self.fused_read, self.fused_two_shot)


SIZES_BY_RANKS = {
    2: AllReduceSizes(one_shot=256 * KIB, two_shot=8192 * KIB, fused_push=512 * KIB, fused_read=8192 * KIB),
    4: AllReduceSizes(
        one_shot=512 * KIB,
        two_shot=8192 * KIB,
        fused_push=4 * KIB,
        fused_read=448 * KIB,
        fused_two_shot=8192 * KIB,
    ),
    8: AllReduceSizes(
        one_shot=256 * KIB,
        two_shot=16384 * KIB,
        fused_push=64 * KIB,
        fused_read=256 * KIB,
        fused_two_shot=8192 * KIB,
    ),
}
"""Default maximum message sizes by number of ranks. Up to a method's maximum message size, the method was
faster than the methods for larger messages, as measured by `benchmarks/allreduce.py`."""
FORCED_SIZES = {
    "nccl": AllReduceSizes(),
    "one-shot": AllReduceSizes(one_shot=BUFFER_BYTES),
    "two-shot": AllReduceSizes(two_shot=BUFFER_BYTES),
    "push": AllReduceSizes(one_shot=BUFFER_BYTES, fused_push=BUFFER_BYTES),
    "fused": AllReduceSizes(one_shot=BUFFER_BYTES, fused_read=BUFFER_BYTES),
    "fused-two-shot": AllReduceSizes(two_shot=BUFFER_BYTES, fused_two_shot=BUFFER_BYTES),
}
"""Maximum sizes by value of `--all-reduce` (other than "auto"). The method of that name handles all messages
that it supports."""
METHODS = ("auto", *FORCED_SIZES)
"""Possible values of `--all-reduce`."""


def resolve_sizes(method: str, ranks: int) -> AllReduceSizes:
    """Return the maximum message sizes for a value of `--all-reduce` and a number of ranks.

    Raises:
        ValueError: the method is unknown.
    """
    if method not in METHODS:
        raise ValueError(f"--all-reduce must be one of {', '.join(METHODS)}, not {method!r}")
    if method != "auto":
        return FORCED_SIZES[method]
    return SIZES_BY_RANKS.get(ranks, AllReduceSizes(one_shot=256 * KIB))


class FusedAllReduceNorm:
    """All-reduce fused with residual addition and norm; has up to three kernels, for rows of one length."""

    def __init__(self, memory: PeerMemory, columns: int, sizes: AllReduceSizes) -> None:
        """Allocate the peer memory and compile the kernels; all ranks must call this together."""
        from mizzen.kernels.comm.allreduce_rmsnorm import AllReduceRMSNorm, ReduceMethod, region_bytes

        ranks, rank = memory.group.size(), memory.group.rank()
        methods: tuple[tuple[int, ReduceMethod], ...] = (
            (sizes.fused_push, "push"),
            (sizes.fused_read, "read"),
            (sizes.fused_two_shot, "two_shot"),
        )
        limits: list[tuple[int, ReduceMethod]] = [
            (size // (2 * columns), method) for size, method in methods if size // (2 * columns)
        ]
        self.regions = [
            memory.allocate_region(region_bytes(columns, ranks, max_rows, method))
            for max_rows, method in limits
        ]
        self.kernels = [
            AllReduceRMSNorm(addresses, columns, rank, max_rows, memory.device, method)
            for (max_rows, method), (_, addresses) in zip(limits, self.regions, strict=True)
        ]

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor | None:
        """Run the first kernel that has room for the rows of x; return None if no kernel has enough room."""
        for kernel in self.kernels:
            if len(x) <= kernel.max_rows:
                return kernel(x, residual, weight, epsilon)
        return None


class NcclCollectives(NoPeerMemory):
    """Collectives on GPUs, implemented with NCCL."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over ranks in place, and return it."""
        dist.all_reduce(x, group=self.group)
        return x

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor | None:
        """Return None: NCCL has no such operation."""
        return None

    def gather_columns(self, x: torch.Tensor, total: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Gather x of all ranks, then concatenate the columns."""
        rows, share = x.shape
        blocks = torch.empty((self.size * rows, share), dtype=x.dtype, device=x.device)
        all_gather(blocks, x.contiguous(), group=self.group)
        return concatenate_columns(blocks.view(self.size, rows, share), total, out)

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite x with rank 0's values."""
        dist.broadcast(x, src=0, group=self.group)

    def lookup_rows(
        self, ids: torch.Tensor, table: torch.Tensor, shard: slice, total: int
    ) -> torch.Tensor | None:
        """Return None: NCCL has no such operation."""
        return None

    def close(self) -> None:
        """Do nothing: `RankGroup` closes the process group."""


class CudaCollectives(NcclCollectives):
    """Collectives on GPUs that use peer memory for small messages and NCCL for all others."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, method: str, *, first: bool = True
    ) -> None:
        """Set up NCCL and peer memory; all ranks must call this together.

        Args:
            group: Process group of the ranks.
            device: Device of this rank.
            method: Value of `--all-reduce`.
            first: Whether this is the first group of this process; otherwise peer memory is not available.

        Raises:
            ValueError: the method is unknown.
        """
        super().__init__(group)
        self.sizes = resolve_sizes(method, self.size)
        self.peers: PeerMemory | None = None
        if self.sizes != AllReduceSizes():
            self.peers = make_peer_memory(group, device, first=first)
        self.fused_norms: dict[int, FusedAllReduceNorm | None] = {}
        """Fused norm kernels by row length in elements; None for lengths that are not supported."""
        self.peer_kernels: dict[str, Any] = {}
        """Other kernels that use peer memory, by name; None for a kernel that is not supported."""

    def uses_peer_memory(self, x: torch.Tensor) -> bool:
        """Return whether `all_reduce` reduces x over peer memory."""
        size = x.numel() * x.element_size()
        fits = not size % (ALIGNMENT * self.size) and x.dtype.is_floating_point
        return self.peers is not None and fits and size <= max(self.sizes.one_shot, self.sizes.two_shot)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of x over ranks, computed by the method that handles messages of this size."""
        if self.peers is None or not self.uses_peer_memory(x):
            return super().all_reduce(x)
        small = x.numel() * x.element_size() <= self.sizes.one_shot
        return self.peers.one_shot(x) if small else self.peers.two_shot(x)

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor | None:
        """Sum, add and normalise in one kernel; return None if no kernel supports these rows."""
        from mizzen.kernels.comm import allreduce_rmsnorm

        size = x.numel() * x.element_size()
        if self.peers is None or size > self.sizes.max_fused_bytes or not allreduce_rmsnorm.supports(x):
            return None
        columns = x.shape[1]
        if columns not in self.fused_norms:
            if torch.cuda.is_current_stream_capturing():
                return None  # peer memory cannot be allocated now
            self.fused_norms[columns] = make_fused_norm(self.peers, columns, self.sizes)
        norm = self.fused_norms[columns]
        return None if norm is None else norm(x, residual, weight, epsilon)

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite x with rank 0's values.

        Up to `MAX_BROADCAST_TOKENS` int64 values (the last tokens of slots) are sent over peer memory.
        """
        tokens = x.dtype == torch.int64 and len(x) <= MAX_BROADCAST_TOKENS
        kernel = self._peer_kernel("tokens", make_token_broadcast) if tokens else None
        if kernel is None:
            super().broadcast(x)
        else:
            kernel(x)

    def allocate_logits_buffer(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate a logits buffer in peer memory, or in plain memory if peer memory is not available."""
        buffer = None
        if not torch.cuda.is_current_stream_capturing():
            buffers: LogitsBuffers | None = self._peer_kernel("logits", make_logits_buffers)
            buffer = buffers and buffers.allocate(rows, columns, dtype)
        return super().allocate_logits_buffer(rows, columns, dtype, device) if buffer is None else buffer

    def map_logits_shard(self, out: torch.Tensor, shard: slice) -> torch.Tensor | None:
        """Return the view of rank 0's memory for a shard; None if `out` is not in a logits buffer."""
        buffers: LogitsBuffers | None = self.peer_kernels.get("logits")
        return buffers and buffers.map_shard(out, shard)

    def wait_for_logits(self) -> None:
        """Make rank 0 wait for the other ranks' writes to the logits buffer."""
        buffers: LogitsBuffers | None = self.peer_kernels.get("logits")
        if buffers is not None:
            buffers.wait_for_writes()

    def lookup_rows(
        self, ids: torch.Tensor, table: torch.Tensor, shard: slice, total: int
    ) -> torch.Tensor | None:
        """Look up at most `MAX_LOOKUP_ROWS` rows over peer memory; return None if that is not possible."""
        row_bytes = table.shape[1] * table.element_size()
        if len(ids) > MAX_LOOKUP_ROWS or row_bytes % ALIGNMENT:
            return None
        kernel = self._peer_kernel("rows", lambda memory: make_row_lookup(memory, table, shard, total))
        return None if kernel is None else kernel(ids, table, shard, total)

    def _peer_kernel(self, name: str, make: Callable[[PeerMemory], Any]) -> Any:
        if self.peers is None:
            return None
        if name not in self.peer_kernels:
            if torch.cuda.is_current_stream_capturing():
                return None  # peer memory cannot be allocated now
            self.peer_kernels[name] = make(self.peers)
        return self.peer_kernels[name]

    def close(self) -> None:
        """Release the peer buffers."""
        self.fused_norms.clear()
        self.peer_kernels.clear()
        self.peers = None


def make_fused_norm(memory: PeerMemory, columns: int, sizes: AllReduceSizes) -> FusedAllReduceNorm | None:
    """Make and check the fused kernels for rows of `columns` elements.

    Log a warning and return None if any rank cannot use them.
    """
    return make_on_all_ranks(
        memory,
        "all-reduce falls back to kernels that are not fused with norms",
        lambda memory: FusedAllReduceNorm(memory, columns, sizes),
        lambda fused: check_fused_norms(fused, memory, columns),
    )


def check_fused_norms(fused: FusedAllReduceNorm, memory: PeerMemory, columns: int) -> bool:
    """Return whether the fused kernels agree with NCCL and PyTorch on this rank, in several calls.

    Every rank runs all checks whatever their results, so that no rank waits for a rank that stopped early.
    """
    device, group, correct = memory.device, memory.group, True
    generator = torch.Generator(device).manual_seed(group.rank())
    weight = torch.linspace(0.5, 1.5, columns, device=device).to(torch.bfloat16)
    for kernel in fused.kernels:
        for rows in (1, kernel.max_rows, 1, min(3, kernel.max_rows)):
            x = torch.randint(-8, 8, (rows, columns), device=device, generator=generator).to(torch.bfloat16)
            total, residual = x.clone(), torch.ones_like(x)
            dist.all_reduce(total, group=group)
            stream = total + residual
            expected = torch.nn.functional.rms_norm(stream, (columns,), weight, 1e-6)
            normed = kernel(x, residual, weight, 1e-6)
            close = torch.allclose(normed, expected, atol=0.05, rtol=0.05)
            correct = torch.equal(residual, stream) and close and correct
    return correct
