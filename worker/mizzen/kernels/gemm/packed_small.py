# SPDX-License-Identifier: Apache-2.0
"""GEMM over packed quantized weights for 1 to 16 rows of x, bound by the memory that holds the weights.

Weights are in the fragment layout of `mizzen.kernels.gemm.fragments`, so a lane loads the operands of its
MMAs with 16 bytes at a time, without any shuffles, and converts them exactly. Products are accumulated in
float32 within each group of columns; then the group's scale multiplies the sum. So the result differs from
that of the dequantized weight only by rounding in float32, and does not depend on other rows of x.

Weights stream through a ring in shared memory, which is filled before the kernel waits for the previous one,
as in `mizzen.kernels.gemm.gemv`. Like that kernel, it can add a single row of x to the residual stream and
normalise the sum first. See `packed_small.cu`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mizzen.kernels.gemm.fragments import STRIP_ROWS, PackedWeight, ScaleLayout
from mizzen.kernels.gemm.gemv import PreNorm
from mizzen.kernels.gemm.packed_small_tiles import (
    TILE_INPUTS,
    TILE_ROWS,
    PackedFormat,
    SmallTileConfig,
    select_tile_config,
)
from mizzen.kernels.launch import is_hopper_or_later
from mizzen.kernels.nvrtc import KernelSpec, launch, load_kernel, read_source
from mizzen.layers.quantized.canonical import Codes

MAX_BATCH = 16
"""Largest number of rows of x that the kernel supports."""
MAX_BATCH_BY_CODES = {Codes.UINT4: 8, Codes.INT8: 4, Codes.E4M3: 4}
"""Number of rows of x up to which the kernel was measured to be faster than `packed_swap_ab` on an H200.

The times in microseconds, for shapes of Qwen3-8B, are those at 1 and at 8 rows, and that of `packed_swap_ab`
for up to 16 rows, from a separate run:
UINT4 by 128 columns: gate-up 17.6, 19.0, 20.7; down 11.3, 12.2, 14.8; qkv 6.0, 8.2, 8.6; o 5.0, 6.3, 7.0.
E4M3 in blocks: gate-up 25.9, 27.8, 25.2; down 15.0, 17.4, 17.2; qkv 9.2, 11.0, 10.6; o 7.3, 8.2, 8.8.
"""
MAX_BYTES_OF_CODES = 64 << 20
"""Bytes of codes of 8 bits beyond which `packed_swap_ab` was measured to be faster even for one row of x."""
CODE_MACROS = {Codes.UINT4: 0, Codes.INT8: 1, Codes.E4M3: 2}
LAYOUT_MACROS = {ScaleLayout.ROW: 0, ScaleLayout.OCTET: 1, ScaleLayout.GROUP: 2}
DTYPE_MACROS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MAX_NORM_COLUMNS = 4096
"""Most columns of a row of x that the kernel normalises, as each of its blocks normalises the whole row.

Longer rows were not measured; they use a separate kernel.
"""
SOURCE = (
    "typedef unsigned long long u64;\n"
    + read_source("bf16")
    + read_source("gemm/hopper")
    + read_source("gemm/fragments")
    + read_source("gemm/row_norm")
    + read_source("gemm/packed_small")
)


def format_of(weight: PackedWeight) -> PackedFormat:
    """Return the properties of a weight on which its kernel depends."""
    return PackedFormat(
        codes=weight.codes,
        strips=weight.strips,
        columns=weight.padded_columns,
        layout=weight.scale_layout,
        dtype=weight.scales.dtype,
        has_zeros=weight.zeros is not None,
        group_columns=0 if weight.scale_layout is ScaleLayout.ROW else weight.group_columns,
        swiglu=weight.swiglu,
    )


def supports(weight: PackedWeight) -> bool:
    """Return whether the kernel supports a weight; it needs a GPU of the Hopper generation or later.

    Groups must have 32 columns or a multiple of 64, and rows of x must be aligned to 16 bytes. If these are
    long, fewer than `MAX_BATCH` of them may fit in shared memory.
    """
    if not is_hopper_or_later(weight.values.device) or weight.columns % 8:
        return False
    whole_groups = weight.group_columns % 64 == 0 or (weight.group_columns == 32 and weight.columns % 64 == 0)
    if weight.scale_layout is not ScaleLayout.ROW and not whole_groups:
        return False
    return select_tile_config(format_of(weight), 1) is not None


def supports_norm(weight: PackedWeight) -> bool:
    """Return whether the kernel can normalise a single row of x for a weight that it supports.

    The row must not be too long, need neither padding nor another order of its columns, and be multiplied
    without k-splits.
    """
    if weight.order is not None or not weight.padded_columns == weight.columns <= MAX_NORM_COLUMNS:
        return False
    config = select_tile_config(format_of(weight), 1)
    return config is not None and config.split_k == 1


def compile_definitions(
    weight: PackedFormat, config: SmallTileConfig, count: int, *, norm: bool = False
) -> tuple[tuple[str, int], ...]:
    """Return the preprocessor definitions for a weight, a tiling and `count` rows of x.

    With `norm`, the kernel normalises a single row of x first.
    """
    return (
        ("CODES", CODE_MACROS[weight.codes]),
        ("SCALE_LAYOUT", LAYOUT_MACROS[weight.layout]),
        ("SCALE_TYPE", DTYPE_MACROS[weight.dtype]),
        ("HAS_ZEROS", int(weight.has_zeros)),
        ("GROUP_COLUMNS", weight.group_columns),
        ("SWIGLU", int(weight.swiglu)),
        ("N_TILES", -(-count // TILE_INPUTS)),
        ("TILES", config.tiles),
        ("SPLIT_K", config.split_k),
        ("WARPS", config.warps),
        ("SLOTS", config.slots),
        ("CHUNKS", config.chunks),
        ("BLOCKS_PER_SM", config.blocks_per_sm),
        ("SAVED", config.saved(count)),
        ("NORM_COLUMNS", weight.columns if norm else 0),
    )


def max_batch(weight: PackedWeight) -> int:
    """Return the largest number of rows of x for which the kernel was measured to be fastest.

    For more rows, `mizzen.kernels.gemm.packed_swap_ab` is as fast or faster. The result is 0 if the kernel
    does not support the weight, or is not the fastest for any number of rows.
    """
    if not supports(weight):
        return 0
    largest = MAX_BATCH_BY_CODES[weight.codes]
    if weight.codes is not Codes.UINT4 and weight.values.numel() > MAX_BYTES_OF_CODES:
        largest = 0
    described = format_of(weight)
    return next((count for count in range(largest, 0, -1) if select_tile_config(described, count)), 0)


def kernel_specs(weight: PackedWeight, batch_sizes: Iterable[int], *, norm: bool = False) -> set[KernelSpec]:
    """Return the specs of the kernels for a weight and batches of `batch_sizes` rows, up to `MAX_BATCH`.

    With `norm`, a row that is normalised first is among them, if `supports_norm` accepts the weight.
    """
    described = format_of(weight)
    batches = [count for count in batch_sizes if count <= MAX_BATCH]
    cases = [(count, False) for count in batches]
    cases += [(1, True)] if norm and 1 in batches and supports_norm(weight) else []
    return {
        (SOURCE, "packed_small", compile_definitions(described, config, count, norm=normed))
        for count, normed in cases
        if (config := select_tile_config(described, count)) is not None
    }


def packed_small_gemm(
    weight: PackedWeight,
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    swiglu: bool = False,
    config: SmallTileConfig | None = None,
    norm: PreNorm | None = None,
    new_residual: torch.Tensor | None = None,
    next_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x times the transpose of a packed weight, bfloat16 [count, rows].

    Args:
        weight: Weight that `supports` accepts.
        x: Input rows, bfloat16 [count, columns] and contiguous, 1 to 16 of them. For a weight with an
            `order`, the columns of x are in that order.
        out: Contiguous tensor for the result; by default a new one.
        swiglu: Whether to return silu(gate) * up, [count, rows / 2]; the weight must be packed for it, and
            a weight that is packed for it supports nothing else.
        config: Tiling; by default that of `select_tile_config`.
        norm: Residual addition and norm to apply to a single row of x first, if `supports_norm` accepts the
            weight.
        new_residual: Tensor [1, columns] for the sum of `x` and the residual; required if `norm` has a
            residual. It must be neither `x` nor the residual itself.
        next_weight: Contiguous bytes, a multiple of 16, of the weight of the next product, which the kernel
            loads into the L2 cache; None for none.

    Raises:
        ValueError: the weight is not packed for the value of `swiglu`, the tiling does not support it, or x
            cannot be normalised.
    """
    if swiglu != weight.swiglu:
        raise ValueError(f"swiglu is {swiglu}, but the weight is packed for {weight.swiglu}; pack it again")
    described, count = format_of(weight), len(x)
    config = config or select_tile_config(described, count)
    if config is None or not config.supports(described, count):
        raise ValueError(f"no tiling supports {described} and {count} rows of x (tiling: {config})")
    outputs = weight.rows // (1 + swiglu)
    if out is None:
        out = torch.empty((count, outputs), dtype=x.dtype, device=x.device)
    normed: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, float] = (
        None,
        None,
        None,
        0.0,
    )
    if norm is not None:
        if count > 1 or config.split_k > 1 or not supports_norm(weight):
            raise ValueError(f"{count} rows of x cannot be normalised for {described} (tiling: {config})")
        normed = (norm.residual, norm.scale, new_residual, norm.epsilon)
    definitions = compile_definitions(described, config, count, norm=norm is not None)
    function = load_kernel(SOURCE, "packed_small", definitions, x.device.index or 0)
    units = weight.strips * STRIP_ROWS // (config.tiles * TILE_ROWS)
    clusters = -(-units // config.units)
    few_units, more = divmod(units, clusters)
    stages = weight.padded_columns // config.stage_columns(described)
    next_bytes = 0 if next_weight is None else next_weight.numel()
    shared_bytes, sums_at = config.shared_layout(described, count)
    sizes = (stages, weight.groups, weight.columns, outputs, count, few_units, more, config.units, sums_at)
    launch(
        function,
        clusters * config.split_k,
        32 * config.warps,
        (weight.values, weight.scales, weight.zeros, x, out, *sizes, *normed, next_weight, next_bytes),
        cluster=(config.split_k, 1, 1),
        shared_bytes=shared_bytes,
    )
    return out
