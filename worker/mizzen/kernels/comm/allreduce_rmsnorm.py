# SPDX-License-Identifier: Apache-2.0
"""All-reduce over peer memory, fused with the residual addition and RMSNorm that follow it.

One block per row exchanges the row with the other ranks, adds up the rows of all ranks and the residual
stream, and normalises the sum. Without fusion, this takes an all-reduce with two barriers across the GPUs,
and a second kernel. allreduce_rmsnorm.cu describes the methods of exchange. NVRTC compiles the kernel for
each row length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from mizzen.kernels.nvrtc import CompileError, launch, load_kernel, read_source

SOURCE = read_source("bf16") + read_source("comm/peer") + read_source("comm/allreduce_rmsnorm")
VECTOR = 8
"""Number of bfloat16 elements that a thread moves at once."""
MAX_THREADS = 1024
MAX_COLUMNS = 8192
"""Length of the longest supported row in elements."""
ReduceMethod = Literal["read", "push", "two_shot"]
"""Method of exchanging rows: each rank reads the rows of the other ranks ("read"), sends its rows to them
("push"), or reduces a share of the rows and sends the sums ("two_shot"). See allreduce_rmsnorm.cu."""
METHOD_CODES: dict[ReduceMethod, int] = {"read": 0, "push": 1, "two_shot": 2}


def threads_of(columns: int) -> int:
    """Return the number of threads per block: one per 16-byte vector, rounded up to warps, at most 1024."""
    vectors = columns // VECTOR
    return min(MAX_THREADS, -(-vectors // 32) * 32)


def compile_definitions(
    columns: int, ranks: int, max_rows: int, method: ReduceMethod
) -> tuple[tuple[str, int], ...]:
    """Return the preprocessor definitions of the kernel for up to `max_rows` rows of `columns` elements."""
    sizes = (("VECTORS", columns // VECTOR), ("THREADS", threads_of(columns)), ("RANKS", ranks))
    return (*sizes, ("MAX_ROWS", max_rows), ("METHOD", METHOD_CODES[method]))


def region_bytes(columns: int, ranks: int, max_rows: int, method: ReduceMethod) -> int:
    """Return how many bytes of peer memory each rank needs for `max_rows` rows of `columns` elements."""
    row = 2 * columns
    if method == "push":
        return 2 * ranks * max_rows * row * 2
    areas = 2 if method == "two_shot" else 1
    return 2 * areas * max_rows * row + 4 * max_rows * ranks


def supports(x: torch.Tensor) -> bool:
    """Return whether the kernel supports x: contiguous bfloat16 [rows, columns].

    The number of columns must be a multiple of 8 and at most `MAX_COLUMNS`.
    """
    columns = x.shape[-1]
    fits = x.dim() == 2 and not columns % VECTOR and columns <= MAX_COLUMNS
    return fits and x.dtype == torch.bfloat16 and x.is_contiguous()


class AllReduceRMSNorm:
    """All-reduce fused with residual addition and RMSNorm, for rows of one length.

    Ranks exchange rows through one region of each rank's memory, which must be zeroed before the first use.
    """

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
            regions: Device address of each rank's region, in rank order. A region has `region_bytes` bytes.
            columns: Elements per row.
            rank: Index of this rank.
            max_rows: Maximum number of rows per call.
            device: Device of this rank.
            method: Method of exchanging rows.

        Raises:
            CompileError: the kernel cannot be compiled on this machine, or `device` has no index.
        """
        self.max_rows = max_rows
        self.rank = rank
        self.threads = threads_of(columns)
        self.peers = torch.tensor(regions, dtype=torch.int64, device=device)
        self.calls = torch.zeros(max_rows, dtype=torch.int32, device=device)
        if device.index is None:
            raise CompileError(f"the device {device} has no index")
        sizes = compile_definitions(columns, len(regions), max_rows, method)
        self.function = load_kernel(SOURCE, "allreduce_rmsnorm", sizes, device.index)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Add x, summed over the ranks, to `residual` in place; return the normalised and scaled sum.

        x, `residual` and the result are bfloat16 [rows, columns], `weight` is bfloat16 [columns].
        """
        out = torch.empty_like(x)
        launch(
            self.function,
            len(x),
            self.threads,
            (self.peers, self.calls, x, residual, weight, out, self.rank, float(epsilon)),
        )
        return out
