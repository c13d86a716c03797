# SPDX-License-Identifier: Apache-2.0
"""Swap-AB GEMM for M <= 256, for decode batches.

Weight rows are the wgmma M dimension (64 per warpgroup) and the batch is N (8 to 256), so small batches waste
little, and large batches reuse each weight that is loaded. TMA loads both operands; weight loads start before
the PDL wait. Split-K partial sums are reduced inside a cluster of blocks, in a fixed order. The kernel can
apply SwiGLU or add a bias to its outputs.
The technique is that of CUTLASS' warp-specialised Hopper kernels with multicast; see `swap_ab.cu`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mizzen.kernels.gemm.hopper import (
    ALIGNMENT,
    MAX_SHARED_BYTES,
    STAGE_COLUMNS,
    kernel_source,
    make_tensor_map,
    make_weight_map,
)
from mizzen.kernels.gemm.tile_configs import MAX_BATCHES, TILE_CONFIGS
from mizzen.kernels.nvrtc import KernelSpec, launch, load_kernel

BATCH_SIZES = tuple(range(16, 257, 16))
"""Numbers of rows of x for which the kernel is compiled; other batches are padded to a larger number."""
MEASURED_BATCH_SIZES = (16, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes at which all shapes were measured. A batch size that neither this tuple nor `TILE_CONFIGS`
lists uses the tile config of the next larger measured size."""
SM_COUNT = 132
"""Number of SMs of the H200 on which shapes were measured."""
MAX_CLUSTER_SIZE = 8
"""Number of blocks in the largest cluster that every GPU with clusters supports."""
MAX_UNMEASURED_COLUMNS = 16 << 10
"""Maximum number of columns for which the kernel is assumed to be as fast as cuBLAS if this is unmeasured."""
MAX_OUTPUTS = 64 << 10
"""Maximum number of weight rows; for larger weights, such as output heads, cuBLAS is as fast."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tiling of a swap-AB GEMM."""

    rows: int
    """Weight rows per block: 64, 128 or 192."""
    split_k: int
    """Number of k-splits: parts of the inner dimension that different blocks multiply."""
    multicast: int
    """Number of blocks that load x together by TMA multicast."""
    blocks_per_sm: int = 1
    """Number of blocks that fit on an SM; if two, one may belong to the next kernel and prefetch weights."""

    def stages(self, batch: int, steps: int) -> int:
        """Return the number of pipeline stages that fit in shared memory; 0 if fewer than two fit.

        `batch` is the number of rows of x. `steps` is the number of columns of a k-split divided by
        `STAGE_COLUMNS`.
        """
        stage_bytes = (self.rows + batch) * STAGE_COLUMNS * 2
        fitting = (MAX_SHARED_BYTES // self.blocks_per_sm - ALIGNMENT - 512) // stage_bytes
        return 0 if fitting < 2 else min(fitting, steps, 16)

    def shared_bytes(self, batch: int, steps: int) -> int:
        """Return the dynamic shared memory of a block in bytes; for parameters see `stages`."""
        pipeline = self.stages(batch, steps) * (self.rows + batch) * STAGE_COLUMNS * 2
        staging = -(-batch // 8 // self.split_k) * 8 * (self.rows + 8) * 2
        sums = self.rows * batch * 4 if self.split_k > 1 else 0
        return max(pipeline, sums + staging) + ALIGNMENT

    def supports(self, rows: int, columns: int, batch: int) -> bool:
        """Return whether this tiling is valid for a weight [rows, columns] and `batch` rows of x."""
        steps = columns // STAGE_COLUMNS // self.split_k
        return (
            columns % STAGE_COLUMNS == 0
            and rows % 8 == 0
            and batch % (8 * self.multicast) == 0
            and self.split_k * self.multicast <= MAX_CLUSTER_SIZE
            and self.stages(batch, steps) >= 2
            and self.shared_bytes(batch, steps) <= MAX_SHARED_BYTES // self.blocks_per_sm
        )


def select_tile_config(rows: int, columns: int, count: int) -> TileConfig | None:
    """Return the tile config for `count` rows of x; None if no config supports the shape."""
    padded = pad_batch(rows, columns, count)
    return None if padded is None else padded[1]


@functools.cache
def pad_batch(
    rows: int, columns: int, count: int, config: TileConfig | None = None
) -> tuple[int, TileConfig] | None:
    """Return the compiled batch size for `count` rows of x, and its tile config (`config` if given).

    The size is the smallest sufficient one with a supported config, because padding rows are multiplied, too.
    Return None if no size has a supported config.
    """
    for batch in BATCH_SIZES:
        if batch >= count:
            candidate = config or tile_config_for(rows, columns, batch)
            if candidate.supports(rows, columns, batch):
                return batch, candidate
    return None


def tile_config_for(rows: int, columns: int, batch: int) -> TileConfig:
    """Return the tile config for a weight [rows, columns] and a compiled batch size.

    It is the measured config if there is one, and otherwise the default.
    """
    configs = TILE_CONFIGS.get((rows, columns), {})
    next_measured = next(size for size in MEASURED_BATCH_SIZES if batch <= size)
    return TileConfig(
        *(configs.get(batch) or configs.get(next_measured) or default_tile_config(rows, columns, batch))
    )


def default_tile_config(rows: int, columns: int, batch: int) -> tuple[int, int, int, int]:
    """Return the fields of the `TileConfig` for an unmeasured shape.

    The rule aims at one wave of blocks that fills almost all SMs. For long inner dimensions it prefers more
    k-splits to blocks of few weight rows, because each block loads all of x.
    """

    def tiles(height: int) -> int:
        return -(-rows // height)

    if tiles(64) > SM_COUNT:
        height = 128 if tiles(128) <= SM_COUNT else 192
        return height, 1, 2 if batch > 128 else 1, 1
    if rows <= columns >= 4096 and (columns < 8192 or batch > 64) and tiles(192) * 4 <= SM_COUNT:
        return 192, 4, 1, 1
    max_blocks = SM_COUNT if columns >= 4096 else SM_COUNT // 2
    split_k = max(split for split in (1, 2, 4) if split == 1 or tiles(64) * split <= max_blocks)
    return (64, split_k, 1, 2) if batch <= 64 else (64, split_k, 4 if split_k == 1 else 1, 1)


def max_batch(weight: torch.Tensor, *, swiglu: bool = False) -> int:
    """Return the largest batch for which the kernel was measured to be no slower than cuBLAS.

    The result is 0 if the kernel is slower for every batch, or does not support the weight [rows, columns].
    The kernel and cuBLAS were measured within whole steps, between the kernels that precede and follow them.
    """
    rows, columns = weight.shape
    if columns % STAGE_COLUMNS or (swiglu and rows % 16) or rows > MAX_OUTPUTS:
        return 0
    by_rule = 256 if swiglu else 192 if columns >= 3072 else 64
    if columns > MAX_UNMEASURED_COLUMNS:
        by_rule = max(TILE_CONFIGS.get((rows, columns), {}), default=0)
    largest = MAX_BATCHES.get((rows, columns), by_rule)
    supported = all(select_tile_config(rows, columns, batch) for batch in BATCH_SIZES if batch <= largest)
    return largest if supported else 0


def compile_definitions(
    batch: int, config: TileConfig, stages: int, *, swiglu: bool, defer_pdl: bool = False, bias: bool = False
) -> tuple[tuple[str, int], ...]:
    """Return the preprocessor definitions for a compiled batch size and tile config."""
    return (
        ("BATCH", batch),
        ("TILE_ROWS", config.rows),
        ("SPLIT_K", config.split_k),
        ("MULTICAST", config.multicast),
        ("STAGES", stages),
        ("SWIGLU", int(swiglu)),
        ("DEFER_PDL", int(defer_pdl)),
        ("ROTATE", 1),
        ("BIAS", int(bias)),
    )


def kernel_spec(
    columns: int, batch: int, config: TileConfig, *, swiglu: bool, defer_pdl: bool, bias: bool = False
) -> KernelSpec:
    """Return the spec of the kernel for a compiled batch size and tile config."""
    stages = config.stages(batch, columns // STAGE_COLUMNS // config.split_k)
    defines = compile_definitions(batch, config, stages, swiglu=swiglu, defer_pdl=defer_pdl, bias=bias)
    return kernel_source("swap_ab", batch), "swap_ab", defines


def kernel_specs(
    rows: int,
    columns: int,
    batch_sizes: Iterable[int],
    *,
    swiglu: bool = False,
    defer_pdl: bool = False,
    bias: bool = False,
) -> set[KernelSpec]:
    """Return the specs of the kernels for a weight [rows, columns] and batches of `batch_sizes` rows."""
    padded = {pad_batch(rows, columns, size) for size in batch_sizes}
    return {
        kernel_spec(columns, *batch_and_config, swiglu=swiglu, defer_pdl=defer_pdl, bias=bias)
        for batch_and_config in padded
        if batch_and_config is not None
    }


def swap_ab_gemm(
    weight: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    swiglu: bool = False,
    defer_pdl: bool = False,
    bias: torch.Tensor | None = None,
    config: TileConfig | None = None,
) -> torch.Tensor:
    """Return x times the transpose of `weight`, [batch, rows]; all tensors are bfloat16 and contiguous.

    Args:
        weight: Weight [rows, columns]; with `swiglu`, gate rows followed by up rows.
        x: Input rows [batch, columns], 1 to 256 of them.
        out: Tensor for the result; by default a new one.
        swiglu: Whether to return silu(gate) * up, [batch, rows / 2].
        defer_pdl: Whether to trigger PDL only after accumulation. If attention blocks started earlier, they
            would crowd on the SMs that this kernel leaves idle, and stay there.
        bias: Bias [rows] to add to the product, in float32; None for none, and not with `swiglu`.
        config: Tiling; by default the measured or default one.

    Raises:
        ValueError: the shape is not supported by `config`, or by any tile config if there is no `config`; or
            there is a bias and `swiglu`.
    """
    if swiglu and bias is not None:
        raise ValueError("a swap-AB GEMM with SwiGLU cannot have a bias")
    rows, columns = weight.shape
    batch_and_config = pad_batch(rows, columns, len(x), config)
    if batch_and_config is None:
        raise ValueError(f"no tile config supports {rows} x {columns} weights and {len(x)} rows: {config}")
    batch, config = batch_and_config
    outputs = rows // (1 + swiglu)
    if out is None:
        out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    spec = kernel_spec(columns, batch, config, swiglu=swiglu, defer_pdl=defer_pdl, bias=bias is not None)
    function = load_kernel(*spec, x.device.index or 0)
    box = (STAGE_COLUMNS, batch // config.multicast)
    input_map = make_tensor_map(x.data_ptr(), (columns, len(x)), (columns,), box)
    weight_map = make_weight_map(weight, config.rows, swiglu=swiglu)
    tiles = -(-rows // config.rows)
    tiles = -(-tiles // config.multicast) * config.multicast
    biases = () if bias is None else (bias,)
    launch(
        function,
        (tiles, config.split_k, 1),
        128 * (1 if config.rows == 64 else 2) + 128,
        (weight_map, input_map, out, outputs, len(x), columns // STAGE_COLUMNS, *biases),
        cluster=(config.multicast, config.split_k, 1),
        shared_bytes=config.shared_bytes(batch, columns // STAGE_COLUMNS // config.split_k),
    )
    return out
