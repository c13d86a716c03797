# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs of aligned pairs with quantized experts: `grouped_gemm` with weights decoded in registers.

The two codes of a byte are those of adjacent columns. Inputs have the even columns before the odd ones, so
that the low and the high halves of a tile of bytes are multiplied by adjacent inputs, and no code has to move
to another register.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mizzen.kernels.experts.align import AlignedPairs
from mizzen.kernels.experts.codes import decode_bytes, decode_scale
from mizzen.kernels.experts.gate import Gate, apply_gate
from mizzen.kernels.experts.grouped_gemm import GroupedTile
from mizzen.kernels.experts.matrices import CodedMatrices
from mizzen.kernels.launch import pdl_launch_options


@triton.jit
def _multiply(rows, weights, sums, SWAP: tl.constexpr):
    """Add the product of rows [pairs, columns] and weights [outputs, columns] to the sums."""
    if SWAP:
        sums = tl.dot(weights, tl.trans(rows), sums, input_precision="ieee")
    else:
        sums = tl.dot(rows, tl.trans(weights), sums, input_precision="ieee")
    return sums


@triton.jit
def _multiply_both(evens, odds, low, high, sums, PER_BYTE: tl.constexpr, SWAP: tl.constexpr):
    """Add the products of even and odd columns, if a byte has both, to the sums."""
    sums = _multiply(evens, low, sums, SWAP)
    if PER_BYTE == 2:
        sums = _multiply(odds, high, sums, SWAP)
    return sums


@triton.jit
def _add_stage(
    evens, odds, codes, scale_at, zero_at, group, sums,
    KIND: tl.constexpr, PER_BYTE: tl.constexpr, STEP: tl.constexpr, SCALES: tl.constexpr,
    ZEROS: tl.constexpr, SWAP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add the product of a stage's inputs and weights, with codes [outputs, bytes], to the sums.

    `group` is the number of the stage's first scale; with a STEP of 0, the caller multiplies by the scales.
    """
    OUTPUTS: tl.constexpr = codes.shape[0]
    BYTES: tl.constexpr = codes.shape[1]
    SHARE: tl.constexpr = STEP // PER_BYTE
    dtype: tl.constexpr = evens.dtype
    low, high = decode_bytes(codes, dtype, KIND, ZEROS, ASM)
    if STEP == 0 or SHARE >= BYTES:
        if ZEROS:
            # Differences of codes are exact in 16 bits.
            zero = tl.load(zero_at + group).to(dtype)[:, None]
            low -= zero
            high -= zero
        if STEP == 0:
            sums = _multiply_both(evens, odds, low, high, sums, PER_BYTE, SWAP)
        else:
            product = _multiply_both(evens, odds, low, high, tl.zeros_like(sums), PER_BYTE, SWAP)
            scale = decode_scale(tl.load(scale_at + group), tl.float32)
            sums += product * (scale[:, None] if SWAP else scale[None, :])
    else:
        GROUPS: tl.constexpr = BYTES // SHARE
        number = tl.minimum(group + tl.arange(0, GROUPS), SCALES - 1)
        if ZEROS:
            zero = tl.load(zero_at[:, None] + number[None, :]).to(dtype)[:, :, None]
            zero = tl.reshape(tl.broadcast_to(zero, (OUTPUTS, GROUPS, SHARE)), (OUTPUTS, BYTES))
            low -= zero
            high -= zero
        # Products with the powers of two of E2M1 are exact; others are rounded once.
        exact: tl.constexpr = dtype if KIND == 4 else tl.float32
        scale = decode_scale(tl.load(scale_at[:, None] + number[None, :]), exact)[:, :, None]
        scale = tl.reshape(tl.broadcast_to(scale, (OUTPUTS, GROUPS, SHARE)), (OUTPUTS, BYTES))
        low = (low.to(exact) * scale).to(dtype)
        high = (high.to(exact) * scale).to(dtype)
        sums = _multiply_both(evens, odds, low, high, sums, PER_BYTE, SWAP)
    return sums


@triton.jit(do_not_specialize=["blocks"])
def _grouped_kernel(
    x, values, scales, zeros, bias, out, pairs, block_experts, limit, slope, blocks,
    PER_ROW: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    KIND: tl.constexpr, PER_BYTE: tl.constexpr, ROW_STEP: tl.constexpr, STEP: tl.constexpr,
    SCALES: tl.constexpr, ZEROS: tl.constexpr, APART: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, SWAP: tl.constexpr, SPAN: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a block of pairs by a tile of weight rows; -1 stands for no gate.

    `x` is [pairs / PER_ROW, INNER], `values` hold [held, SIZE, INNER] (with a gate 2 * SIZE), `out` is
    [pairs, SIZE]. With APART, even outputs are written before odd ones.
    """
    TILES: tl.constexpr = (SIZE + OUTPUTS - 1) // OUTPUTS
    HAS_GATE: tl.constexpr = GATE >= 0
    LINE: tl.constexpr = INNER // PER_BYTE
    BYTES: tl.constexpr = COLUMNS // PER_BYTE
    program = tl.program_id(0)
    block, tile = program // TILES, program % TILES
    if SPAN > 1:
        block = program // (SPAN * TILES) * SPAN + program % SPAN
        tile = program % (SPAN * TILES) // SPAN
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(block_experts + block, block < blocks, -1)
    if expert < 0:
        return
    at = pairs + block * ROWS
    pair = tl.load(at + tl.arange(0, ROWS))
    real = pair >= 0
    # Padding repeats the first pair, which every used block has.
    pair = tl.where(real, pair, tl.load(at)).to(tl.int64)
    output, byte = tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, BYTES)
    exists = output < SIZE
    row = expert.to(tl.int64) * SIZE * (1 + HAS_GATE) + tl.where(exists, output, 0)
    scale_row, up_scale_row = row // ROW_STEP * SCALES, (row + SIZE) // ROW_STEP * SCALES
    x_at = x + (pair // PER_ROW)[:, None] * INNER + byte[None, :]
    codes_at = values + row[:, None] * LINE + byte[None, :]
    sums = tl.zeros((OUTPUTS, ROWS) if SWAP else (ROWS, OUTPUTS), tl.float32)
    ups = sums
    for start in range(0, LINE, BYTES):
        within = (start + byte < LINE)[None, :]
        group = start * PER_BYTE // STEP if STEP > 0 else 0
        if LINE % BYTES == 0:
            evens = tl.load(x_at + start)
            odds = tl.load(x_at + LINE + start) if PER_BYTE == 2 else evens
            codes = tl.load(codes_at + start)
        else:
            evens = tl.load(x_at + start, within, 0.0)
            odds = tl.load(x_at + LINE + start, within, 0.0) if PER_BYTE == 2 else evens
            codes = tl.load(codes_at + start, within, 0)
        sums = _add_stage(
            evens, odds, codes, scales + scale_row, zeros + scale_row, group, sums,
            KIND, PER_BYTE, STEP, SCALES, ZEROS, SWAP, ASM,
        )  # fmt: skip
        if HAS_GATE:
            if LINE % BYTES == 0:
                codes = tl.load(codes_at + SIZE * LINE + start)
            else:
                codes = tl.load(codes_at + SIZE * LINE + start, within, 0)
            ups = _add_stage(
                evens, odds, codes, scales + up_scale_row, zeros + up_scale_row, group, ups,
                KIND, PER_BYTE, STEP, SCALES, ZEROS, SWAP, ASM,
            )  # fmt: skip
    if SWAP:
        sums, ups = tl.trans(sums), tl.trans(ups)
    if STEP == 0:
        sums *= decode_scale(tl.load(scales + scale_row), tl.float32)[None, :]
        if HAS_GATE:
            ups *= decode_scale(tl.load(scales + up_scale_row), tl.float32)[None, :]
    if BIAS:
        sums += tl.load(bias + row).to(tl.float32)[None, :]
        if HAS_GATE:
            ups += tl.load(bias + row + SIZE).to(tl.float32)[None, :]
    if HAS_GATE:
        sums = apply_gate(sums, ups, limit, slope, GATE)
    place = output % 2 * (SIZE // 2) + output // 2 if APART else output
    out_at = out + pair[:, None] * SIZE + place[None, :]
    tl.store(out_at, sums.to(out.dtype.element_ty), real[:, None] & exists[None, :])


def _launch(
    x: torch.Tensor,
    aligned: AlignedPairs,
    weight: CodedMatrices,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: GroupedTile,
    *,
    per_row: int,
    gate: Gate | None,
    apart: bool,
) -> None:
    size, blocks, scales, zeros = out.shape[1], len(aligned.experts), weight.scales, weight.zeros
    _grouped_kernel[(triton.cdiv(blocks, tile.span) * tile.span * triton.cdiv(size, tile.outputs),)](
        x, weight.values, scales, scales if zeros is None else zeros, x if bias is None else bias, out,
        aligned.pairs, aligned.experts,
        0.0 if gate is None else gate.limit, 0.0 if gate is None else gate.slope, blocks,
        PER_ROW=per_row, SIZE=size, INNER=weight.columns, GATE=-1 if gate is None else gate.number,
        BIAS=bias is not None, **weight.constants, APART=apart, ROWS=tile.rows, OUTPUTS=tile.outputs,
        COLUMNS=tile.columns, SWAP=tile.swap, SPAN=tile.span, ASM=x.is_cuda and x.dtype == torch.bfloat16,
        num_warps=tile.warps, num_stages=tile.stages, **pdl_launch_options(x),
    )  # fmt: skip


def gate_up_grouped_coded(
    x: torch.Tensor,
    per_token: int,
    aligned: AlignedPairs,
    weight: CodedMatrices,
    gate: Gate,
    tile: GroupedTile,
    bias: torch.Tensor | None = None,
    *,
    apart: bool = False,
) -> torch.Tensor:
    """Multiply each pair's token by gate and up of its expert; return activation(gate) * up, [pairs, width].

    Rows of pairs that are in no block are not written.

    Args:
        x: Inputs [tokens, hidden]; if a byte holds two codes, the even columns before the odd ones.
        per_token: Number of experts that a token chooses.
        aligned: Pairs, in blocks of `tile.rows`.
        weight: Gate rows, then up rows, of each expert.
        gate: Function of gate and up.
        tile: Tiling.
        bias: Biases of the weight's rows, [held, 2 * width].
        apart: Whether the even columns of the result are before the odd ones.
    """
    inner = torch.empty(len(x) * per_token, weight.rows // 2, dtype=x.dtype, device=x.device)
    _launch(x, aligned, weight, bias, inner, tile, per_row=per_token, gate=gate, apart=apart)
    return inner


def down_grouped_coded(
    inner: torch.Tensor,
    aligned: AlignedPairs,
    weight: CodedMatrices,
    tile: GroupedTile,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each pair's inner elements by down of its expert; return the outputs [pairs, hidden].

    Rows of pairs that are in no block are not written.

    Args:
        inner: Inner elements [pairs, width]; if a byte holds two codes, the even columns before the odd ones.
        aligned: Pairs, in blocks of `tile.rows`.
        weight: Down projections.
        tile: Tiling.
        bias: Biases of the outputs, [held, hidden].
    """
    outputs = torch.empty(len(inner), weight.rows, dtype=inner.dtype, device=inner.device)
    _launch(inner, aligned, weight, bias, outputs, tile, per_row=1, gate=None, apart=False)
    return outputs


def put_even_columns_first(x: torch.Tensor) -> torch.Tensor:
    """Return x [rows, columns] with the even columns before the odd ones, contiguous."""
    return x.unflatten(1, (-1, 2)).transpose(1, 2).reshape(x.shape)
