# SPDX-License-Identifier: Apache-2.0
"""Small exchanges over peer memory: token broadcast, lookup in a sharded table, barrier for writes to rank 0.

Each exchange is one kernel, without a barrier across all GPUs. NVRTC compiles the kernels; see
peer_broadcast.cu.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mizzen.kernels.nvrtc import CompileError, launch, load_kernel, read_source

SOURCE = read_source("comm/peer") + read_source("comm/peer_broadcast")
TOKEN_THREADS = 256
VECTOR_BYTES = 16
MAX_THREADS = 512
BARRIER_THREADS = 32
"""Number of threads of the write barrier; it needs one per rank."""


def compile_definitions(vectors: int, ranks: int, max_rows: int) -> tuple[tuple[str, int], ...]:
    """Return the preprocessor definitions for up to `max_rows` rows of `vectors` times 16 bytes."""
    threads = min(MAX_THREADS, -(-vectors // 32) * 32)
    return (("VECTORS", vectors), ("THREADS", threads), ("RANKS", ranks), ("MAX_ROWS", max_rows))


class _PeerKernel:
    """Base class of the exchanges: addresses of the ranks' regions, and counters of calls.

    Ranks exchange data through one region of each rank's memory, which must be zeroed before the first use.
    """

    def __init__(
        self, regions: Sequence[int], rank: int, max_rows: int, calls: int, device: torch.device
    ) -> None:
        if device.index is None:
            raise CompileError(f"the device {device} has no index")
        self.region: torch.Tensor | None = None
        """Memory of this rank's region, kept alive as long as this object; set by the caller."""
        self.max_rows = max_rows
        self.rank = rank
        self.peers = torch.tensor(regions, dtype=torch.int64, device=device)
        self.calls = torch.zeros(calls, dtype=torch.int32, device=device)


class TokenBroadcast(_PeerKernel):
    """Copies int64 values from rank 0 to all ranks, in place."""

    def __init__(self, regions: Sequence[int], rank: int, max_rows: int, device: torch.device) -> None:
        """Compile the kernel for up to `max_rows` values.

        Raises:
            CompileError: the kernel cannot be compiled on this machine, or `device` has no index.
        """
        super().__init__(regions, rank, max_rows, 1, device)
        self.function = load_kernel(
            SOURCE, "broadcast_tokens", compile_definitions(1, len(regions), max_rows), device.index
        )

    @staticmethod
    def region_bytes(max_rows: int) -> int:
        """Return the size in bytes of a rank's region for broadcasts of up to `max_rows` values."""
        return 2 * max_rows * VECTOR_BYTES

    def __call__(self, values: torch.Tensor) -> None:
        """Overwrite `values` (int64 [rows], contiguous) with the values of rank 0; all ranks call this."""
        launch(self.function, 1, TOKEN_THREADS, (self.peers, self.calls, values, len(values), self.rank))


class RowLookup(_PeerKernel):
    """Looks up rows of a table that is sharded by rows over the ranks."""

    def __init__(
        self, regions: Sequence[int], rank: int, max_rows: int, row_bytes: int, device: torch.device
    ) -> None:
        """Compile the kernel for lookups of up to `max_rows` rows of `row_bytes` bytes.

        Raises:
            CompileError: the kernel cannot be compiled on this machine, or `device` has no index.
        """
        super().__init__(regions, rank, max_rows, max_rows, device)
        sizes = compile_definitions(row_bytes // VECTOR_BYTES, len(regions), max_rows)
        self.threads = dict(sizes)["THREADS"]
        self.function = load_kernel(SOURCE, "lookup_rows", sizes, device.index)

    @staticmethod
    def region_bytes(max_rows: int, row_bytes: int) -> int:
        """Return the size in bytes of a rank's region for lookups of up to `max_rows` rows."""
        return 2 * max_rows * row_bytes * 2

    def __call__(self, ids: torch.Tensor, table: torch.Tensor, shard: slice, total: int) -> torch.Tensor:
        """Return the table's rows for `ids` (int64 [rows]), [rows, columns]; all ranks call this.

        Args:
            ids: Ids to look up; those outside 0..total-1 yield zeros.
            table: Rows of this rank, [any, columns], starting with the row of the id `shard.start`.
            shard: Ids whose rows this rank holds.
            total: Number of ids in the whole table, over all ranks.
        """
        out = torch.empty((len(ids), table.shape[1]), dtype=table.dtype, device=table.device)
        count = shard.stop - shard.start
        numbers = (shard.start, count, total, self.rank)
        launch(self.function, len(ids), self.threads, (self.peers, self.calls, ids, table, out, *numbers))
        return out


class WriteBarrier(_PeerKernel):
    """Makes rank 0 wait until the other ranks' earlier writes to its memory are visible."""

    def __init__(self, regions: Sequence[int], rank: int, device: torch.device) -> None:
        """Compile the kernel.

        Raises:
            CompileError: there are more than `BARRIER_THREADS` ranks, `device` has no index, or the kernel
                cannot be compiled on this machine.
        """
        if len(regions) > BARRIER_THREADS:
            raise CompileError(f"{len(regions)} ranks exceed the maximum of {BARRIER_THREADS}")
        super().__init__(regions, rank, 1, 1, device)
        self.function = load_kernel(
            SOURCE, "wait_for_writes", compile_definitions(1, len(regions), 1), device.index
        )

    @staticmethod
    def region_bytes(ranks: int) -> int:
        """Return the size in bytes of a rank's region for a barrier of `ranks` ranks."""
        return 4 * ranks

    def __call__(self) -> None:
        """Signal to rank 0 that this rank's writes are complete; on rank 0, wait for all other ranks."""
        launch(self.function, 1, BARRIER_THREADS, (self.peers, self.calls, self.rank))
