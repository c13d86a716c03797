"""Small exchanges over peer memory: token broadcast, lookup in a sharded table, and a barrier for writes to
rank 0.

Each is one kernel without a barrier of all GPUs; see peer_broadcast.cu. NVRTC compiles them.
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
"""Threads of the write barrier, one per rank."""


def compile_definitions(vectors: int, ranks: int, max_rows: int) -> tuple[tuple[str, int], ...]:
    """Return the preprocessor definitions of the kernels; `vectors` is a row's length in units of 16
    bytes."""
    threads = min(MAX_THREADS, -(-vectors // 32) * 32)
    return (("VECTORS", vectors), ("THREADS", threads), ("RANKS", ranks), ("MAX_ROWS", max_rows))


class _PeerKernel:
    """State of a peer kernel: zero-initialised regions of the ranks' memory, and counters of calls."""

    def __init__(
        self, regions: Sequence[int], rank: int, max_rows: int, calls: int, device: torch.device
    ) -> None:
        if device.index is None:
            raise CompileError("a device without a number")
        self.region: torch.Tensor | None = None
        """This rank's region, which must live as long as the kernel."""
        self.max_rows = max_rows
        self.rank = rank
        self.peers = torch.tensor(regions, dtype=torch.int64, device=device)
        self.calls = torch.zeros(calls, dtype=torch.int32, device=device)


class TokenBroadcast(_PeerKernel):
    """Copies rank 0's int64 values to all ranks, in place."""

    def __init__(self, regions: Sequence[int], rank: int, max_rows: int, device: torch.device) -> None:
        """Compile the kernel for up to `max_rows` values.

        Raises:
            CompileError: the kernel cannot be compiled on this machine.
        """
        super().__init__(regions, rank, max_rows, 1, device)
        self.function = load_kernel(
            SOURCE, "broadcast_tokens", compile_definitions(1, len(regions), max_rows), device.index
        )

    @staticmethod
    def region_bytes(max_rows: int) -> int:
        """Return the size of a rank's region."""
        return 2 * max_rows * VECTOR_BYTES

    def __call__(self, values: torch.Tensor) -> None:
        """Overwrite `values` (contiguous) with rank 0's."""
        launch(self.function, 1, TOKEN_THREADS, (self.peers, self.calls, values, len(values), self.rank))


class RowLookup(_PeerKernel):
    """Looks up rows of a table that is sharded over the ranks."""

    def __init__(
        self, regions: Sequence[int], rank: int, max_rows: int, row_bytes: int, device: torch.device
    ) -> None:
        """Compile the kernel for rows of `row_bytes`, up to `max_rows` at a time.

        Raises:
            CompileError: the kernel cannot be compiled on this machine.
        """
        super().__init__(regions, rank, max_rows, max_rows, device)
        sizes = compile_definitions(row_bytes // VECTOR_BYTES, len(regions), max_rows)
        self.threads = dict(sizes)["THREADS"]
        self.function = load_kernel(SOURCE, "lookup_rows", sizes, device.index)

    @staticmethod
    def region_bytes(max_rows: int, row_bytes: int) -> int:
        """Return the size of a rank's region."""
        return 2 * max_rows * row_bytes * 2

    def __call__(self, ids: torch.Tensor, table: torch.Tensor, shard: slice, total: int) -> torch.Tensor:
        """Look up ids (int64 [rows]); the first rows of `table` are those of the ids `shard`, out of `total`
        ids."""
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
            CompileError: there are too many ranks, or the kernel cannot be compiled on this machine.
        """
        if len(regions) > BARRIER_THREADS:
            raise CompileError(f"{len(regions)} ranks, more than {BARRIER_THREADS}")
        super().__init__(regions, rank, 1, 1, device)
        self.function = load_kernel(
            SOURCE, "wait_for_writes", compile_definitions(1, len(regions), 1), device.index
        )

    @staticmethod
    def region_bytes(ranks: int) -> int:
        """Return the size of a rank's region."""
        return 4 * ranks

    def __call__(self) -> None:
        """Signal rank 0 that this rank's writes are complete; on rank 0, wait for all other ranks."""
        launch(self.function, 1, BARRIER_THREADS, (self.peers, self.calls, self.rank))
