"""Rank 0's last tokens to all ranks, rows of a table that is split over ranks, and word that a write is done.

One kernel each over peer memory, without a barrier between the GPUs; see share.cu. NVRTC compiles them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mizzen.kernels.nvrtc import CompileError, load_kernel, launch, read_source

SOURCE = read_source("comm/peer") + read_source("comm/peer_broadcast")
TOKEN_THREADS = 256
VECTOR_BYTES = 16
MOST_THREADS = 512
MEETING_THREADS = 32
"""One a rank, at most."""


def definitions(vectors: int, ranks: int, room: int) -> tuple[tuple[str, int], ...]:
    """Return what the kernels are compiled with; `vectors` is a row's length in 16 bytes."""
    threads = min(MOST_THREADS, -(-vectors // 32) * 32)
    return (("VECTORS", vectors), ("THREADS", threads), ("RANKS", ranks), ("ROOM", room))


class _Shared:
    """What all kernels have: the ranks' regions of memory, which begin with zeros, and counted calls."""

    def __init__(
        self, regions: Sequence[int], rank: int, room: int, calls: int, device: torch.device
    ) -> None:
        if device.index is None:
            raise CompileError("a device without a number")
        self.region: torch.Tensor | None = None
        """This rank's, kept as long as the kernel."""
        self.room = room
        self.rank = rank
        self.peers = torch.tensor(regions, dtype=torch.int64, device=device)
        self.calls = torch.zeros(calls, dtype=torch.int32, device=device)


class TokenBroadcast(_Shared):
    """Rank 0's int64 numbers to all, in place."""

    def __init__(self, regions: Sequence[int], rank: int, room: int, device: torch.device) -> None:
        """Compile it, for `room` numbers at most.

        Raises:
            CompileError: it cannot be compiled here.
        """
        super().__init__(regions, rank, room, 1, device)
        self.function = load_kernel(SOURCE, "tokens", definitions(1, len(regions), room), device.index)

    @staticmethod
    def region_bytes(room: int) -> int:
        """Return the peer memory that it needs."""
        return 2 * room * VECTOR_BYTES

    def __call__(self, values: torch.Tensor) -> None:
        """Overwrite `values` (contiguous) with rank 0's."""
        launch(self.function, 1, TOKEN_THREADS, (self.peers, self.calls, values, len(values), self.rank))


class Lookup(_Shared):
    """Rows of a table of which each rank holds some."""

    def __init__(
        self, regions: Sequence[int], rank: int, room: int, row_bytes: int, device: torch.device
    ) -> None:
        """Compile it, for rows of so many bytes, `room` at a time at most.

        Raises:
            CompileError: it cannot be compiled here.
        """
        super().__init__(regions, rank, room, room, device)
        sizes = definitions(row_bytes // VECTOR_BYTES, len(regions), room)
        self.threads = dict(sizes)["THREADS"]
        self.function = load_kernel(SOURCE, "lookup", sizes, device.index)

    @staticmethod
    def region_bytes(room: int, row_bytes: int) -> int:
        """Return the peer memory that it needs."""
        return 2 * room * row_bytes * 2

    def __call__(self, ids: torch.Tensor, table: torch.Tensor, held: slice, total: int) -> torch.Tensor:
        """Look up ids (int64 [rows]) in `table`, whose first rows are those of the ids `held` of `total`."""
        out = torch.empty((len(ids), table.shape[1]), dtype=table.dtype, device=table.device)
        count = held.stop - held.start
        numbers = (held.start, count, total, self.rank)
        launch(self.function, len(ids), self.threads, (self.peers, self.calls, ids, table, out, *numbers))
        return out


class Meeting(_Shared):
    """Lets rank 0 wait until the others' writes to its memory are there."""

    def __init__(self, regions: Sequence[int], rank: int, device: torch.device) -> None:
        """Compile it.

        Raises:
            CompileError: it cannot be compiled here.
        """
        if len(regions) > MEETING_THREADS:
            raise CompileError(f"{len(regions)} ranks, more than {MEETING_THREADS}")
        super().__init__(regions, rank, 1, 1, device)
        self.function = load_kernel(SOURCE, "meet", definitions(1, len(regions), 1), device.index)

    @staticmethod
    def region_bytes(ranks: int) -> int:
        """Return the peer memory that it needs."""
        return 4 * ranks

    def __call__(self) -> None:
        """Tell rank 0 that what this rank wrote is there; on rank 0, wait for that of all."""
        launch(self.function, 1, MEETING_THREADS, (self.peers, self.calls, self.rank))
