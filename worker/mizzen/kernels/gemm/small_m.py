"""Products of 2 to 32 rows with a weight matrix on tensor cores, for small batches of decodes.

A block computes a few outputs of all rows; its warps share the length of the inner dimension. Weights go
from memory straight to the registers that a tensor core reads them from (the inner dimension is permuted
alike in both operands, so that a thread's part of it is contiguous), and the first of them are asked for
before the kernel waits for the one ahead of it, as in `mizzen.kernels.gemm.gemv`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mizzen.kernels.nvrtc import load_kernel, launch, read_source

THREADS = 256
WARPS = THREADS // 32
SEGMENT = 32
"""Columns that four threads load at once, 16 bytes each."""
PART = 8
"""Rows of x in half of a tensor core's tile."""
PARTS = (1, 2, 4)
"""Halves that the kernel is compiled for."""
WIDEST = ((8 << 20, 16), (256 << 20, 4))
"""(weights at most, rows of x): for how many rows the kernel beats cuBLAS and `mizzen.kernels.gemm.swap_ab`."""
MEASURED = {(51200, 5120): 16}
"""The same by (rows, columns) of the weight where it is not as by size: `wide` does not serve this one."""
SOURCE = read_source("gemm/small_m")


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut into blocks."""

    tiles: int
    """Tiles of 8 weight rows in a block."""
    loads: int
    """Loads of a row that a thread has in flight."""


def cut_of(rows: int, columns: int) -> Cut:
    """Choose how to cut, by what was measured: short rows whole in flight, long ones in several rounds."""
    share = -(-columns // (SEGMENT * WARPS))
    if share <= 4:
        return Cut(4, share)
    if share <= 12:
        return Cut(2, share)
    if rows > 4096:
        return Cut(4, 2)
    return Cut(4, 4) if share <= 16 else Cut(2, 8)


def widest(weight: torch.Tensor) -> int:
    """Return for how many rows of x the kernel was measured to be the fastest; 1 where for none.

    Every block fetches all of x: with more rows, that comes to more than the weights.
    """
    if weight.shape[1] % SEGMENT:
        return 1
    rule = next((rows for elements, rows in WIDEST if weight.numel() <= elements), 1)
    return MEASURED.get((weight.shape[0], weight.shape[1]), rule)


def skinny(
    weight: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    gate: bool = False,
    cut: Cut | None = None,
) -> torch.Tensor:
    """Return x [1 to 32, columns] times the transpose of weight [rows, columns]: [len(x), rows], bfloat16.

    With `gate`, weight's rows are gates and then what they multiply, and the result is
    silu(gates) * others [len(x), rows / 2]. All are contiguous; columns are a multiple of 32.
    """
    rows, columns = weight.shape
    rows //= 1 + gate
    if out is None:
        out = torch.empty((len(x), rows), dtype=x.dtype, device=x.device)
    parts = next(parts for parts in PARTS if len(x) <= PART * parts)
    cut = cut or cut_of(rows, columns)
    sizes = (("COLUMNS", columns), ("PARTS", parts), ("TILES", cut.tiles), ("LOADS", cut.loads))
    defines = (*sizes, ("GATE", int(gate)))
    function = load_kernel(SOURCE, "skinny", defines, x.device.index or 0)
    width = cut.tiles * 8 // (1 + gate)
    launch(function, -(-rows // width), THREADS, (weight, x, out, rows, len(x)))
    return out
