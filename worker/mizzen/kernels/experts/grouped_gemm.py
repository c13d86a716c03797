# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs of aligned pairs: each block of pairs is multiplied by the weights of its expert.

The grid is that of the worst case (see `align.py`); programs of unused blocks exit at once. With few rows per
block the operands are swapped: weight rows are the M dimension of wgmma, at least 64 of them, and
the pairs its N dimension, so that a block of 16 pairs wastes no tensor core time (as in
`mizzen.kernels.gemm.swap_ab`). Inner dimensions are summed in ascending order in float32, so a row's result
is the same in all batches that use the same tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mizzen.kernels.experts.align import AlignedPairs
from mizzen.kernels.experts.gate import Gate, apply_gate
from mizzen.kernels.launch import pdl_launch_options


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """Tiling of a grouped GEMM."""

    rows: int
    """Pairs per block."""
    outputs: int
    """Outputs per block; with a gate, each of them has a gate row and an up row."""
    columns: int
    """Inner elements per pipeline stage."""
    stages: int
    """Number of pipeline stages."""
    warps: int
    """Warps per block."""
    swap: bool
    """Whether weight rows are the M dimension of the tensor cores' instructions."""
    span: int = 1
    """Consecutive blocks of pairs that run side by side with the same weight rows. If an expert's weights do
    not fit in the L2 cache, a span of one reads them from memory for each of the expert's blocks."""


@triton.jit
def multiply(rows, weights, sums, SWAP: tl.constexpr):
    """Add the product of rows [pairs, columns] and weights [outputs, columns] to the sums."""
    if SWAP:
        sums = tl.dot(weights, tl.trans(rows), sums, input_precision="ieee")
    else:
        sums = tl.dot(rows, tl.trans(weights), sums, input_precision="ieee")
    return sums


@triton.jit
def locate_tile(program, TILES: tl.constexpr, SPAN: tl.constexpr):
    """Return the number of a program's block of pairs, and that of its tile of weight rows out of TILES."""
    block, tile = program // TILES, program % TILES
    if SPAN > 1:
        block = program // (SPAN * TILES) * SPAN + program % SPAN
        tile = program % (SPAN * TILES) // SPAN
    return block, tile


@triton.jit
def load_pairs(pairs, block, ROWS: tl.constexpr):
    """Return the pairs of a used block, int64 [ROWS], and which of them are real; others repeat the first."""
    at = pairs + block * ROWS
    pair = tl.load(at + tl.arange(0, ROWS))
    real = pair >= 0
    return tl.where(real, pair, tl.load(at)).to(tl.int64), real


@triton.jit(do_not_specialize=["blocks"])
def _grouped_kernel(
    x, weight, bias, out, pairs, block_experts, limit, slope, blocks,
    PER_ROW: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, SWAP: tl.constexpr, SPAN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a block of pairs by a tile of weight rows; -1 stands for no gate.

    `x` is [pairs / PER_ROW, INNER], `weight` [held, SIZE, INNER] (with a gate 2 * SIZE), `out` [pairs, SIZE].
    """
    TILES: tl.constexpr = (SIZE + OUTPUTS - 1) // OUTPUTS
    HAS_GATE: tl.constexpr = GATE >= 0
    block, tile = locate_tile(tl.program_id(0), TILES, SPAN)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(block_experts + block, block < blocks, -1)
    if expert < 0:
        return
    pair, real = load_pairs(pairs, block, ROWS)
    output, column = tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, COLUMNS)
    exists = output < SIZE
    weight_row = expert.to(tl.int64) * SIZE * (1 + HAS_GATE) + tl.where(exists, output, 0)
    x_at = x + (pair // PER_ROW)[:, None] * INNER + column[None, :]
    weight_at = weight + weight_row[:, None] * INNER + column[None, :]
    sums = tl.zeros((OUTPUTS, ROWS) if SWAP else (ROWS, OUTPUTS), tl.float32)
    ups = sums
    for start in range(0, INNER, COLUMNS):
        within = (start + column < INNER)[None, :]
        if INNER % COLUMNS == 0:
            rows = tl.load(x_at + start)
            weights = tl.load(weight_at + start)
        else:
            rows = tl.load(x_at + start, within, 0.0)
            weights = tl.load(weight_at + start, within, 0.0)
        sums = multiply(rows, weights, sums, SWAP)
        if HAS_GATE:
            if INNER % COLUMNS == 0:
                weights = tl.load(weight_at + SIZE * INNER + start)
            else:
                weights = tl.load(weight_at + SIZE * INNER + start, within, 0.0)
            ups = multiply(rows, weights, ups, SWAP)
    if SWAP:
        sums, ups = tl.trans(sums), tl.trans(ups)
    if BIAS:
        sums += tl.load(bias + weight_row).to(tl.float32)[None, :]
        if HAS_GATE:
            ups += tl.load(bias + weight_row + SIZE).to(tl.float32)[None, :]
    if HAS_GATE:
        sums = apply_gate(sums, ups, limit, slope, GATE)
    out_at = out + pair[:, None] * SIZE + output[None, :]
    tl.store(out_at, sums.to(out.dtype.element_ty), real[:, None] & exists[None, :])


def _launch(
    x: torch.Tensor,
    aligned: AlignedPairs,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: GroupedTile,
    *,
    per_row: int,
    gate: Gate | None,
) -> None:
    size, inner, blocks = out.shape[1], x.shape[1], len(aligned.experts)
    _grouped_kernel[(triton.cdiv(blocks, tile.span) * tile.span * triton.cdiv(size, tile.outputs),)](
        x, weight, weight if bias is None else bias, out, aligned.pairs, aligned.experts,
        0.0 if gate is None else gate.limit, 0.0 if gate is None else gate.slope, blocks,
        PER_ROW=per_row, SIZE=size, INNER=inner, GATE=-1 if gate is None else gate.number,
        BIAS=bias is not None, ROWS=tile.rows, OUTPUTS=tile.outputs, COLUMNS=tile.columns, SWAP=tile.swap,
        SPAN=tile.span, num_warps=tile.warps, num_stages=tile.stages, **pdl_launch_options(x),
    )  # fmt: skip


def gate_up_grouped(
    x: torch.Tensor,
    per_token: int,
    aligned: AlignedPairs,
    weight: torch.Tensor,
    gate: Gate,
    tile: GroupedTile,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each pair's token by gate and up of its expert; return activation(gate) * up, [pairs, width].

    Rows of pairs that are in no block are not written.

    Args:
        x: Inputs [tokens, hidden].
        per_token: Number of experts that a token chooses.
        aligned: Pairs, in blocks of `tile.rows`.
        weight: Gate rows, then up rows, of each expert, [held, 2 * width, hidden].
        gate: Function of gate and up.
        tile: Tiling.
        bias: Biases of the weight's rows, [held, 2 * width].
    """
    inner = torch.empty(len(x) * per_token, weight.shape[1] // 2, dtype=x.dtype, device=x.device)
    _launch(x, aligned, weight, bias, inner, tile, per_row=per_token, gate=gate)
    return inner


def down_grouped(
    inner: torch.Tensor,
    aligned: AlignedPairs,
    weight: torch.Tensor,
    tile: GroupedTile,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each pair's inner elements by down of its expert; return the outputs [pairs, hidden].

    Rows of pairs that are in no block are not written.

    Args:
        inner: Inner elements [pairs, width].
        aligned: Pairs, in blocks of `tile.rows`.
        weight: Down projections [held, hidden, width].
        tile: Tiling.
        bias: Biases of the outputs, [held, hidden].
    """
    outputs = torch.empty(len(inner), weight.shape[1], dtype=inner.dtype, device=inner.device)
    _launch(inner, aligned, weight, bias, outputs, tile, per_row=1, gate=None)
    return outputs
