"""All-reduce over peer memory, fused with the residual addition and RMSNorm that follow it.

One block per row sends the row, adds up the rows of all ranks, adds the residual stream and normalises.
Unfused, this takes an all-reduce with two barriers between the GPUs, and another kernel. See
allreduce_rmsnorm.cu for the methods of exchange. NVRTC compiles the kernel for each row length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from mizzen.kernels.nvrtc import CompileError, launch, load_kernel, read_source

SOURCE = read_source("bf16") + read_source("comm/peer") + read_source("comm/allreduce_rmsnorm")
VECTOR = 8
"""bfloat16 elements that a thread moves at once."""
MAX_THREADS = 1024
MAX_COLUMNS = 8192
"""Longest supported row, in elements."""
ReduceMethod = Literal["read", "push", "two_shot"]
"""Method of exchanging rows between ranks; see allreduce_rmsnorm.cu."""
METHOD_CODES: dict[ReduceMethod, int] = {"read": 0, "push": 1, "two_shot": 2}


def threads_of(columns: int) -> int:
    """Return the threads per block: one per 16-byte vector, up to `MAX_THREADS`."""
    vectors = columns // VECTOR
    return min(MAX_THREADS, -(-vectors // 32) * 32)


def compile_definitions(
    columns: int, ranks: int, max_rows: int, method: ReduceMethod
) -> tuple[tuple[str, int], ...]:
    """Return the preprocessor definitions of the kernel."""
    sizes = (("VECTORS", columns // VECTOR), ("THREADS", threads_of(columns)), ("RANKS", ranks))
    return (*sizes, ("MAX_ROWS", max_rows), ("METHOD", METHOD_CODES[method]))


def region_bytes(columns: int, ranks: int, max_rows: int, method: ReduceMethod) -> int:
    """Return the peer memory that `max_rows` rows of `columns` elements need."""
    row = 2 * columns
    if method == "push":
        return 2 * ranks * max_rows * row * 2
    areas = 2 if method == "two_shot" else 1
    return 2 * areas * max_rows * row + 4 * max_rows * ranks


def supports(x: torch.Tensor) -> bool:
    """Return whether the kernel supports rows like those of x [rows, columns]."""
    columns = x.shape[-1]
    fits = x.dim() == 2 and not columns % VECTOR and columns <= MAX_COLUMNS
    return fits and x.dtype == torch.bfloat16 and x.is_contiguous()


class AllReduceRMSNorm:
    """The fused kernel for rows of one length, over zero-initialised regions of the ranks' memory."""

    def __init__(
        self,
        regions: Sequence[int],
        columns: int,
        rank: int,
        max_rows: int,
        device: torch.device,
        method: ReduceMethod,
    ) -> None:
        """Compile the kernel.

        Args:
            regions: Address of each rank's region, of `region_bytes`.
            columns: Elements per row.
            rank: This rank.
            max_rows: Maximum number of rows.
            device: Device of this rank.
            method: Method of exchanging rows.

        Raises:
            CompileError: the kernel cannot be compiled on this machine.
        """
        self.max_rows = max_rows
        self.rank = rank
        self.threads = threads_of(columns)
        self.peers = torch.tensor(regions, dtype=torch.int64, device=device)
        self.calls = torch.zeros(max_rows, dtype=torch.int32, device=device)
        if device.index is None:
            raise CompileError("a device without a number")
        sizes = compile_definitions(columns, len(regions), max_rows, method)
        self.function = load_kernel(SOURCE, "allreduce_rmsnorm", sizes, device.index)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Add the sum over ranks of x to `residual` in place; return the normalised result, [rows,
        columns]."""
        out = torch.empty_like(x)
        launch(
            self.function,
            len(x),
            self.threads,
            (self.peers, self.calls, x, residual, weight, out, self.rank, float(epsilon)),
        )
        return out
