"""All-reduce over peer memory, fused with the residual addition and the norm that follow it.

One block a row sends the row, adds up what the ranks sent, adds the residual stream, and normalises: what
takes an all-reduce and another kernel otherwise, with two barriers between the GPUs in the former. See
reduce.cu for how ranks reach one another. NVRTC compiles the kernel for each length of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from mizzen.kernels.nvrtc import CompileError, load_kernel, launch, read_source

SOURCE = read_source("comm/peer") + read_source("comm/allreduce_rmsnorm")
VECTOR = 8
"""Numbers of bfloat16 in what a thread moves at once."""
MOST_THREADS = 1024
LARGEST = 8192
"""Longest rows, in numbers."""
Way = Literal["read", "push", "shared"]
"""How rows go between ranks; see reduce.cu."""
NUMBERS: dict[Way, int] = {"read": 0, "push": 1, "shared": 2}


def threads_of(columns: int) -> int:
    """Return the threads of a block: one a vector, as far as they go."""
    vectors = columns // VECTOR
    return min(MOST_THREADS, -(-vectors // 32) * 32)


def definitions(columns: int, ranks: int, room: int, way: Way) -> tuple[tuple[str, int], ...]:
    """Return what the kernel is compiled with."""
    sizes = (("VECTORS", columns // VECTOR), ("THREADS", threads_of(columns)), ("RANKS", ranks))
    return (*sizes, ("ROOM", room), ("WAY", NUMBERS[way]))


def region_bytes(columns: int, ranks: int, room: int, way: Way) -> int:
    """Return the peer memory that rows of this length need, for `room` rows."""
    row = 2 * columns
    if way == "push":
        return 2 * ranks * room * row * 2
    areas = 2 if way == "shared" else 1
    return 2 * areas * room * row + 4 * room * ranks


def serves(x: torch.Tensor) -> bool:
    """Tell whether there is a kernel for rows like those of x [rows, columns]."""
    columns = x.shape[-1]
    fits = x.dim() == 2 and not columns % VECTOR and columns <= LARGEST
    return fits and x.dtype == torch.bfloat16 and x.is_contiguous()


class AllReduceRMSNorm:
    """The kernel for rows of one length, over regions of the ranks' memory that begin with zeros."""

    def __init__(
        self, regions: Sequence[int], columns: int, rank: int, room: int, device: torch.device, way: Way
    ) -> None:
        """Compile it.

        Args:
            regions: Address of each rank's region, of `region_bytes`.
            columns: Numbers in a row.
            rank: This one.
            room: Rows at most.
            device: Of this rank.
            way: How rows go.

        Raises:
            CompileError: it cannot be compiled here.
        """
        self.room = room
        self.rank = rank
        self.threads = threads_of(columns)
        self.peers = torch.tensor(regions, dtype=torch.int64, device=device)
        self.calls = torch.zeros(room, dtype=torch.int32, device=device)
        if device.index is None:
            raise CompileError("a device without a number")
        sizes = definitions(columns, len(regions), room, way)
        self.function = load_kernel(SOURCE, "reduce", sizes, device.index)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Add the sum over ranks of x to `residual` in place; return that normalised, [rows, columns]."""
        out = torch.empty_like(x)
        launch(
            self.function,
            len(x),
            self.threads,
            (self.peers, self.calls, x, residual, weight, out, self.rank, float(epsilon)),
        )
        return out
