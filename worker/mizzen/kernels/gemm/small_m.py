"""Small-M GEMM: 2 to 32 rows times a weight matrix by tensor-core MMA, for small decode batches.

A block computes a few outputs for all rows; its warps split the inner dimension. Weights go from memory
straight to the registers of the MMA fragments: the inner dimension is permuted alike in both operands, so
that each thread's elements are contiguous. The first weight loads are issued before the kernel waits for the
previous one, as in `mizzen.kernels.gemm.gemv`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mizzen.kernels.nvrtc import launch, load_kernel, read_source

THREADS = 256
WARPS = THREADS // 32
SEGMENT = 32
"""Columns that four threads load at once, 16 bytes each."""
GROUP_ROWS = 8
"""Rows of x in half of an MMA tile."""
ROW_GROUPS = (1, 2, 4)
"""Numbers of row groups that the kernel is compiled for."""
MAX_BATCH_BY_SIZE = ((8 << 20, 16), (256 << 20, 4))
"""(weights at most, rows of x): up to how many rows the kernel beats cuBLAS and
`mizzen.kernels.gemm.swap_ab`."""
MAX_BATCH_BY_SHAPE = {(51200, 5120): 16}
"""Exceptions to `MAX_BATCH_BY_SIZE` by (rows, columns) of the weight; swap-AB does not serve this shape."""
SOURCE = read_source("gemm/small_m")


@dataclass(frozen=True, slots=True)
class SmallMTileConfig:
    """Tiling of a small-M GEMM."""

    tiles: int
    """Tiles of 8 weight rows per block."""
    loads: int
    """Loads of a weight row that a thread keeps in flight."""


def select_tile_config(rows: int, columns: int) -> SmallMTileConfig:
    """Return the tiling that was measured fastest: short rows fully in flight, long rows in several
    rounds."""
    loads = -(-columns // (SEGMENT * WARPS))
    if loads <= 4:
        return SmallMTileConfig(4, loads)
    if loads <= 12:
        return SmallMTileConfig(2, loads)
    if rows > 4096:
        return SmallMTileConfig(4, 2)
    return SmallMTileConfig(4, 4) if loads <= 16 else SmallMTileConfig(2, 8)


def max_batch(weight: torch.Tensor) -> int:
    """Return the largest number of rows of x for which the kernel was measured to be fastest; 1 if for none.

    Every block loads all of x: with more rows, that exceeds the weights.
    """
    if weight.shape[1] % SEGMENT:
        return 1
    by_size = next((rows for elements, rows in MAX_BATCH_BY_SIZE if weight.numel() <= elements), 1)
    return MAX_BATCH_BY_SHAPE.get((weight.shape[0], weight.shape[1]), by_size)


def small_m_gemm(
    weight: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    swiglu: bool = False,
    config: SmallMTileConfig | None = None,
) -> torch.Tensor:
    """Return x [1 to 32, columns] times the transpose of weight [rows, columns]: [len(x), rows], bfloat16.

    With `swiglu`, the weight holds gate rows followed by up rows, and the result is silu(gate) * up,
    [len(x), rows / 2]. All tensors are contiguous; columns are a multiple of 32.
    """
    rows, columns = weight.shape
    rows //= 1 + swiglu
    if out is None:
        out = torch.empty((len(x), rows), dtype=x.dtype, device=x.device)
    row_groups = next(groups for groups in ROW_GROUPS if len(x) <= GROUP_ROWS * groups)
    config = config or select_tile_config(rows, columns)
    sizes = (
        ("COLUMNS", columns),
        ("ROW_GROUPS", row_groups),
        ("TILES", config.tiles),
        ("LOADS", config.loads),
    )
    defines = (*sizes, ("SWIGLU", int(swiglu)))
    function = load_kernel(SOURCE, "small_m", defines, x.device.index or 0)
    block_outputs = config.tiles * 8 // (1 + swiglu)
    launch(function, -(-rows // block_outputs), THREADS, (weight, x, out, rows, len(x)))
    return out
