# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMM of aligned pairs with quantized experts, whose weights are dequantized in registers.

The grid is that of the worst case (see `align.py`); programs of unused blocks exit at once. Columns are
summed in ascending order in float32, so a row's result is the same in all batches that use the same tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mizzen.kernels.experts.align import AlignedPairs
from mizzen.kernels.experts.matrices import ExpertMatrices
from mizzen.layers.quantized.canonical import IMPLIED_ZEROS, Codes

KINDS = {Codes.E4M3: 0, Codes.INT8: 1, Codes.UINT8: 2, Codes.UINT4: 3}
COLUMN_TILES = (128, 64, 32)
"""Columns of a pipeline stage, the best first. A stage whose columns share a scale is multiplied by it as a
whole; if no size divides the columns of a scale, each weight is multiplied by its own."""
FEW_ROWS, MANY_ROWS = 16, 64
"""Pairs of a block if experts have few or many rows on average."""
FEW_ROWS_PER_EXPERT = 32
"""Average number of rows of an expert up to which blocks have `FEW_ROWS` pairs."""


def choose_columns(matrices: ExpertMatrices) -> int:
    """Return the number of columns of a pipeline stage."""
    if matrices.by_row:
        return COLUMN_TILES[1]
    return next((tile for tile in COLUMN_TILES if matrices.column_step % tile == 0), COLUMN_TILES[-1])


def choose_scale_kind(matrices: ExpertMatrices) -> int:
    """Return 0 if all columns share a scale, 1 if those of a stage do, and 2 if each weight needs its own."""
    if matrices.by_row:
        return 0
    return 1 if matrices.column_step % choose_columns(matrices) == 0 else 2


@triton.jit
def _load_codes(values, row, column, inside, COLUMNS: tl.constexpr, KIND: tl.constexpr):
    """Return codes [outputs, columns] as float32; rows are int64 [outputs], columns int32 [columns]."""
    if KIND == 3:
        packed = tl.load(values + row[:, None] * (COLUMNS // 2) + column[None, :] // 2, inside, 0)
        return ((packed.to(tl.int32) >> (4 * (column[None, :] % 2))) & 15).to(tl.float32)
    codes = tl.load(values + row[:, None] * COLUMNS + column[None, :], inside, 0)
    if KIND == 0:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if KIND == 1:
        return codes.to(tl.int8, bitcast=True).to(tl.float32)
    return codes.to(tl.float32)


@triton.jit
def _quantized_kernel(
    x, values, scales, zeros, orders, out, pairs, block_experts,
    PER_ROW: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr, COLUMNS: tl.constexpr,
    ROW_STEP: tl.constexpr, COLUMN_STEP: tl.constexpr, SCALES: tl.constexpr, KIND: tl.constexpr,
    SCALE_KIND: tl.constexpr, IMPLIED_ZERO: tl.constexpr, ZEROS: tl.constexpr, ORDERS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STAGE: tl.constexpr,
):  # fmt: skip
    """Multiply a block of pairs by a tile of the weight rows of their expert.

    `x` is [pairs / PER_ROW, INNER], `values` hold [experts * SIZE, COLUMNS], `scales` and `zeros` are
    [row steps, SCALES], `out` is [pairs, SIZE].
    """
    TILES: tl.constexpr = (SIZE + OUTPUTS - 1) // OUTPUTS
    block, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    expert = tl.load(block_experts + block)
    if expert < 0:
        return
    pair = tl.load(pairs + block * ROWS + tl.arange(0, ROWS))
    real = pair >= 0
    pair = tl.where(real, pair, 0).to(tl.int64)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    exists = output < SIZE
    row = expert.to(tl.int64) * SIZE + tl.where(exists, output, 0)
    scale_row = (row // ROW_STEP) * SCALES
    dtype = x.dtype.element_ty
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, COLUMNS, STAGE):
        column = start + tl.arange(0, STAGE)
        within = column < COLUMNS
        source = column
        if ORDERS:
            source = tl.load(orders + expert.to(tl.int64) * COLUMNS + column, within, 0)
        inputs = tl.load(
            x + (pair // PER_ROW)[:, None] * INNER + source[None, :], real[:, None] & within[None, :], 0.0
        )
        weights = _load_codes(values, row, column, exists[:, None] & within[None, :], COLUMNS, KIND)
        if SCALE_KIND == 2:
            place = scale_row[:, None] + tl.where(within, column // COLUMN_STEP, 0)[None, :]
            zero = tl.load(zeros + place).to(tl.float32) if ZEROS else IMPLIED_ZERO
            weights = (weights - zero) * tl.load(scales + place).to(tl.float32)
        elif ZEROS:
            zero = tl.load(zeros + scale_row + start // COLUMN_STEP).to(tl.float32)
            weights -= zero[:, None]
        elif IMPLIED_ZERO:
            weights -= IMPLIED_ZERO
        # Padding columns meet inputs of 0, and differences of codes are exact in 16 bits.
        product = tl.dot(inputs, tl.trans(weights.to(dtype)), input_precision="ieee")
        if SCALE_KIND == 1:
            scale = tl.load(scales + scale_row + start // COLUMN_STEP).to(tl.float32)
            product *= scale[None, :]
        sums += product
    if SCALE_KIND == 0:
        sums *= tl.load(scales + scale_row).to(tl.float32)[None, :]
    out_at = out + pair[:, None] * SIZE + output[None, :]
    tl.store(out_at, sums.to(out.dtype.element_ty), real[:, None] & exists[None, :])


def choose_block(pairs: int, experts: int) -> int:
    """Return the number of pairs of a block for a batch with `pairs` pairs in all."""
    return FEW_ROWS if pairs <= FEW_ROWS_PER_EXPERT * experts else MANY_ROWS


def multiply_pairs(
    x: torch.Tensor, matrices: ExpertMatrices, aligned: AlignedPairs, pairs: int, per_row: int
) -> torch.Tensor:
    """Multiply each pair's input by the weight of its expert.

    Args:
        x: Inputs [pairs / per_row, input columns], contiguous.
        matrices: Weights of the experts.
        aligned: The pairs by their experts.
        pairs: Number of pairs, including pairs of other ranks, which are in no block.
        per_row: Number of consecutive pairs that share an input.

    Returns:
        The products [pairs, rows] in the data type of x; rows of pairs in no block are not written.
    """
    out = torch.empty(pairs, matrices.rows, dtype=x.dtype, device=x.device)
    outputs = 64 if aligned.block == FEW_ROWS else 128
    scales, zeros, orders = matrices.scales, matrices.zeros, matrices.orders
    _quantized_kernel[(len(aligned.experts) * triton.cdiv(matrices.rows, outputs),)](
        x, matrices.values, scales, scales if zeros is None else zeros,
        scales if orders is None else orders, out, aligned.pairs, aligned.experts,
        PER_ROW=per_row, SIZE=matrices.rows, INNER=x.shape[1], COLUMNS=matrices.columns,
        ROW_STEP=matrices.row_step, COLUMN_STEP=matrices.column_step, SCALES=scales.shape[1],
        KIND=KINDS[matrices.codes], SCALE_KIND=choose_scale_kind(matrices),
        IMPLIED_ZERO=IMPLIED_ZEROS[matrices.codes], ZEROS=zeros is not None, ORDERS=orders is not None,
        ROWS=aligned.block, OUTPUTS=outputs, STAGE=choose_columns(matrices), num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
