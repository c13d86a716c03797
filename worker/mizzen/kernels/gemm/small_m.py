# SPDX-License-Identifier: Apache-2.0
"""Small-M GEMM on tensor cores: 2 to 32 rows of x times a weight matrix, for small decode batches.

A block computes a few outputs for all rows of x; its warps split the inner dimension. Weights go from memory
straight to the registers of the MMA fragments: the inner dimension is permuted alike in both operands, so
that each thread's elements are contiguous. The first weight loads are issued before the kernel waits for the
previous kernel, as in `mizzen.kernels.gemm.gemv`. The kernel can apply SwiGLU or add a bias to its outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mizzen.kernels.nvrtc import launch, load_kernel, read_source

THREADS = 256
WARPS = THREADS // 32
SEGMENT = 32
"""Number of columns that four threads load at once, 16 bytes each."""
GROUP_ROWS = 8
"""Number of rows of x in a row group, which is half of an MMA tile."""
ROW_GROUPS = (1, 2, 4)
"""Numbers of row groups for which the kernel is compiled."""
MAX_BATCH_BY_SIZE = ((8 << 20, 16), (256 << 20, 4))
"""Pairs (elements, rows): for weights of up to `elements` elements, the kernel was measured to be faster than
cuBLAS and `mizzen.kernels.gemm.swap_ab` for up to `rows` rows of x. The first pair that fits applies."""
MAX_BATCH_BY_SHAPE = {(51200, 5120): 16}
"""Maximum number of rows of x for weights to which `MAX_BATCH_BY_SIZE` does not apply; keys: (rows, columns).

`mizzen.kernels.gemm.swap_ab` is not used for this shape.
"""
SOURCE = read_source("gemm/small_m")


@dataclass(frozen=True, slots=True)
class SmallMTileConfig:
    """Tiling of a small-M GEMM."""

    tiles: int
    """Number of tiles of 8 weight rows per block."""
    loads: int
    """Number of 16-byte loads of a weight row that a thread keeps in flight."""


def select_tile_config(rows: int, columns: int) -> SmallMTileConfig:
    """Return the tiling that was measured fastest for a weight [rows, columns].

    Short weight rows are in flight as a whole; long rows are loaded in several rounds.
    """
    loads = -(-columns // (SEGMENT * WARPS))
    if loads <= 4:
        return SmallMTileConfig(4, loads)
    if loads <= 12:
        return SmallMTileConfig(2, loads)
    if rows > 4096:
        return SmallMTileConfig(4, 2)
    return SmallMTileConfig(4, 4) if loads <= 16 else SmallMTileConfig(2, 8)


def max_batch(weight: torch.Tensor) -> int:
    """Return the largest number of rows of x for which the kernel was measured to be fastest.

    The result is 1 if the kernel is not the fastest for any batch. Every block loads all of x, so with many
    rows a block loads more of x than of the weight.
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
    bias: torch.Tensor | None = None,
    config: SmallMTileConfig | None = None,
) -> torch.Tensor:
    """Return x times the transpose of `weight`, [batch, rows]; all tensors are bfloat16 and contiguous.

    Args:
        weight: Weight [rows, columns], columns a multiple of 32; with `swiglu`, gate rows then up rows.
        x: Input rows [batch, columns], 1 to 32 of them.
        out: Tensor for the result; by default a new one.
        swiglu: Whether to return silu(gate) * up, [batch, rows / 2].
        bias: Bias [rows] to add to the product, in float32; None for none, and not with `swiglu`.
        config: Tiling; by default that of `select_tile_config`.

    Raises:
        ValueError: there is a bias and `swiglu`.
    """
    if swiglu and bias is not None:
        raise ValueError("a small-M GEMM with SwiGLU cannot have a bias")
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
    defines = (*sizes, ("SWIGLU", int(swiglu)), ("BIAS", int(bias is not None)))
    function = load_kernel(SOURCE, "small_m", defines, x.device.index or 0)
    block_outputs = config.tiles * 8 // (1 + swiglu)
    biases = () if bias is None else (bias,)
    launch(function, -(-rows // block_outputs), THREADS, (weight, x, out, rows, len(x), *biases))
    return out
