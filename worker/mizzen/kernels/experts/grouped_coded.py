# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs of aligned pairs with quantized experts: `grouped_gemm` with weights decoded in registers.

Weights are loaded as words of 16 bits, which hold two or four codes of adjacent columns. The inputs are
stored in as many parts (see `put_in_parts`), and the codes at each place of the words are multiplied by one
part, which holds the columns of these codes. Thus no code has to move to another register.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mizzen.kernels.experts.align import AlignedPairs
from mizzen.kernels.experts.codes import decode_large_scale, decode_scale, decode_words
from mizzen.kernels.experts.gate import Gate, apply_gate
from mizzen.kernels.experts.grouped_gemm import GroupedTile, load_pairs, locate_tile, multiply
from mizzen.kernels.experts.matrices import ExpertMatrices
from mizzen.kernels.launch import pdl_launch_options


@triton.jit
def _multiply_parts(x0, x1, x2, x3, w0, w1, w2, w3, sums, PARTS: tl.constexpr, SWAP: tl.constexpr):
    """Add the products of all parts of the inputs and weights to the sums."""
    sums = multiply(x0, w0, sums, SWAP)
    sums = multiply(x1, w1, sums, SWAP)
    if PARTS == 4:
        sums = multiply(x2, w2, sums, SWAP)
        sums = multiply(x3, w3, sums, SWAP)
    return sums


@triton.jit
def _repeat(values, SHARE: tl.constexpr):
    """Return values [outputs, groups], each repeated SHARE times, [outputs, groups * SHARE]."""
    OUTPUTS: tl.constexpr = values.shape[0]
    GROUPS: tl.constexpr = values.shape[1]
    repeated = tl.broadcast_to(values[:, :, None], (OUTPUTS, GROUPS, SHARE))
    return tl.reshape(repeated, (OUTPUTS, GROUPS * SHARE))


@triton.jit
def _add_stage(
    x0, x1, x2, x3, words, scale_at, zero_at, group, sums,
    KIND: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, SCALES: tl.constexpr,
    ZEROS: tl.constexpr, SWAP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add the product of a stage's inputs and weights, with words [outputs, words], to the sums.

    `group` is the number of the stage's first scale; with a STEP of 0, the caller multiplies by the scales.
    The sums of E2M1 are too small by 2 ** 63, or with a STEP of 0 by 2 ** 126.
    """
    WORDS: tl.constexpr = words.shape[1]
    SHARE: tl.constexpr = STEP // PARTS
    dtype: tl.constexpr = x0.dtype
    w0, w1, w2, w3 = decode_words(words, dtype, KIND, ZEROS, ASM)
    if STEP == 0 or SHARE >= WORDS:
        if ZEROS:
            # Differences of codes are exact in 16 bits.
            zero = tl.load(zero_at + group).to(dtype)[:, None]
            w0, w1, w2, w3 = w0 - zero, w1 - zero, w2 - zero, w3 - zero
        if STEP == 0:
            sums = _multiply_parts(x0, x1, x2, x3, w0, w1, w2, w3, sums, PARTS, SWAP)
        else:
            none = tl.zeros_like(sums)
            product = _multiply_parts(x0, x1, x2, x3, w0, w1, w2, w3, none, PARTS, SWAP)
            scale = decode_scale(tl.load(scale_at + group), tl.float32)
            if KIND == 4:
                product *= 9223372036854775808.0  # 2 ** 63
            sums += product * (scale[:, None] if SWAP else scale[None, :])
    else:
        GROUPS: tl.constexpr = WORDS // SHARE
        number = tl.minimum(group + tl.arange(0, GROUPS), SCALES - 1)
        if ZEROS:
            zero = _repeat(tl.load(zero_at[:, None] + number[None, :]).to(dtype), SHARE)
            w0, w1, w2, w3 = w0 - zero, w1 - zero, w2 - zero, w3 - zero
        scale = tl.load(scale_at[:, None] + number[None, :])
        if KIND == 4:
            # Products with powers of two are exact, and so are these unless the scale is less than 2 ** -63.
            factor = _repeat(decode_large_scale(scale, dtype), SHARE)
            w0, w1, w2, w3 = w0 * factor, w1 * factor, w2 * factor, w3 * factor
        else:
            factor = _repeat(decode_scale(scale, tl.float32), SHARE)
            w0, w1 = (w0.to(tl.float32) * factor).to(dtype), (w1.to(tl.float32) * factor).to(dtype)
            w2, w3 = (w2.to(tl.float32) * factor).to(dtype), (w3.to(tl.float32) * factor).to(dtype)
        sums = _multiply_parts(x0, x1, x2, x3, w0, w1, w2, w3, sums, PARTS, SWAP)
    return sums


@triton.jit
def _load_parts(x_at, within, PARTS: tl.constexpr, LINE: tl.constexpr, MASK: tl.constexpr):
    """Return the parts of a stage's inputs, [pairs, words] each; with two parts, each of them twice."""
    if MASK:
        x0, x1 = tl.load(x_at, within, 0.0), tl.load(x_at + LINE, within, 0.0)
    else:
        x0, x1 = tl.load(x_at), tl.load(x_at + LINE)
    x2, x3 = x0, x1
    if PARTS == 4:
        if MASK:
            x2, x3 = tl.load(x_at + 2 * LINE, within, 0.0), tl.load(x_at + 3 * LINE, within, 0.0)
        else:
            x2, x3 = tl.load(x_at + 2 * LINE), tl.load(x_at + 3 * LINE)
    return x0, x1, x2, x3


@triton.jit(do_not_specialize=["blocks"])
def _grouped_kernel(
    x, values, scales, zeros, bias, out, pairs, block_experts, limit, slope, blocks,
    PER_ROW: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    KIND: tl.constexpr, PER_BYTE: tl.constexpr, ROW_STEP: tl.constexpr, STEP: tl.constexpr,
    SCALES: tl.constexpr, ZEROS: tl.constexpr, OUT_PARTS: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, SWAP: tl.constexpr, SPAN: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a block of pairs by a tile of weight rows; -1 stands for no gate.

    `x` is [pairs / PER_ROW, INNER], in parts, `values` hold [held, SIZE, INNER] (with a gate 2 * SIZE), `out`
    is [pairs, SIZE], in OUT_PARTS parts (see `put_in_parts`).
    """
    TILES: tl.constexpr = (SIZE + OUTPUTS - 1) // OUTPUTS
    HAS_GATE: tl.constexpr = GATE >= 0
    PARTS: tl.constexpr = 2 * PER_BYTE
    LINE: tl.constexpr = INNER // PARTS
    WORDS: tl.constexpr = COLUMNS // PARTS
    MASK: tl.constexpr = LINE % WORDS != 0
    block, tile = locate_tile(tl.program_id(0), TILES, SPAN)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(block_experts + block, block < blocks, -1)
    if expert < 0:
        return
    pair, real = load_pairs(pairs, block, ROWS)
    output, word = tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, WORDS)
    exists = output < SIZE
    row = expert.to(tl.int64) * SIZE * (1 + HAS_GATE) + tl.where(exists, output, 0)
    scale_row, up_scale_row = row // ROW_STEP * SCALES, (row + SIZE) // ROW_STEP * SCALES
    x_at = x + (pair // PER_ROW)[:, None] * INNER + word[None, :]
    words_at = values + row[:, None] * LINE + word[None, :]
    sums = tl.zeros((OUTPUTS, ROWS) if SWAP else (ROWS, OUTPUTS), tl.float32)
    ups = sums
    for start in range(0, LINE, WORDS):
        within = (start + word < LINE)[None, :]
        group = start * PARTS // STEP if STEP > 0 else 0
        x0, x1, x2, x3 = _load_parts(x_at + start, within, PARTS, LINE, MASK)
        words = tl.load(words_at + start, within, 0) if MASK else tl.load(words_at + start)
        sums = _add_stage(
            x0, x1, x2, x3, words, scales + scale_row, zeros + scale_row, group, sums,
            KIND, PARTS, STEP, SCALES, ZEROS, SWAP, ASM,
        )  # fmt: skip
        if HAS_GATE:
            up_at = words_at + SIZE * LINE + start
            words = tl.load(up_at, within, 0) if MASK else tl.load(up_at)
            ups = _add_stage(
                x0, x1, x2, x3, words, scales + up_scale_row, zeros + up_scale_row, group, ups,
                KIND, PARTS, STEP, SCALES, ZEROS, SWAP, ASM,
            )  # fmt: skip
    if SWAP:
        sums, ups = tl.trans(sums), tl.trans(ups)
    if KIND == 4:
        factor: tl.constexpr = 9223372036854775808.0  # 2 ** 63
        sums, ups = sums * factor, ups * factor
        if STEP == 0:
            sums, ups = sums * factor, ups * factor
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
    place = output % OUT_PARTS * (SIZE // OUT_PARTS) + output // OUT_PARTS
    out_at = out + pair[:, None] * SIZE + place[None, :]
    tl.store(out_at, sums.to(out.dtype.element_ty), real[:, None] & exists[None, :])


def _launch(
    x: torch.Tensor,
    aligned: AlignedPairs,
    weight: ExpertMatrices,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: GroupedTile,
    *,
    per_row: int,
    gate: Gate | None,
    out_parts: int,
) -> None:
    size, blocks, scales, zeros = out.shape[1], len(aligned.experts), weight.scales, weight.zeros
    values = weight.values.view(torch.int16)
    _grouped_kernel[(triton.cdiv(blocks, tile.span) * tile.span * triton.cdiv(size, tile.outputs),)](
        x, values, scales, scales if zeros is None else zeros, x if bias is None else bias, out,
        aligned.pairs, aligned.experts,
        0.0 if gate is None else gate.limit, 0.0 if gate is None else gate.slope, blocks,
        PER_ROW=per_row, SIZE=size, INNER=weight.columns, GATE=-1 if gate is None else gate.number,
        BIAS=bias is not None, **weight.constants, OUT_PARTS=out_parts, ROWS=tile.rows, OUTPUTS=tile.outputs,
        COLUMNS=tile.columns, SWAP=tile.swap, SPAN=tile.span, ASM=x.is_cuda and x.dtype == torch.bfloat16,
        num_warps=tile.warps, num_stages=tile.stages, **pdl_launch_options(x),
    )  # fmt: skip


def gate_up_grouped_coded(
    x: torch.Tensor,
    per_token: int,
    aligned: AlignedPairs,
    weight: ExpertMatrices,
    gate: Gate,
    tile: GroupedTile,
    bias: torch.Tensor | None = None,
    *,
    out_parts: int = 1,
) -> torch.Tensor:
    """Multiply each pair's token by gate and up of its expert; return activation(gate) * up, [pairs, width].

    Rows of pairs that are in no block are not written.

    Args:
        x: Inputs [tokens, hidden], in `weight.parts` parts; see `put_in_parts`.
        per_token: Number of experts that a token chooses.
        aligned: Pairs, in blocks of `tile.rows`.
        weight: Gate rows, then up rows, of each expert.
        gate: Function of gate and up.
        tile: Tiling.
        bias: Biases of the weight's rows, [held, 2 * width].
        out_parts: Number of parts of the result; see `put_in_parts`.
    """
    inner = torch.empty(len(x) * per_token, weight.rows // 2, dtype=x.dtype, device=x.device)
    _launch(x, aligned, weight, bias, inner, tile, per_row=per_token, gate=gate, out_parts=out_parts)
    return inner


def down_grouped_coded(
    inner: torch.Tensor,
    aligned: AlignedPairs,
    weight: ExpertMatrices,
    tile: GroupedTile,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each pair's inner elements by down of its expert; return the outputs [pairs, hidden].

    Rows of pairs that are in no block are not written.

    Args:
        inner: Inner elements [pairs, width], in `weight.parts` parts; see `put_in_parts`.
        aligned: Pairs, in blocks of `tile.rows`.
        weight: Down projections.
        tile: Tiling.
        bias: Biases of the outputs, [held, hidden].
    """
    outputs = torch.empty(len(inner), weight.rows, dtype=inner.dtype, device=inner.device)
    _launch(inner, aligned, weight, bias, outputs, tile, per_row=1, gate=None, out_parts=1)
    return outputs


def put_in_parts(x: torch.Tensor, parts: int) -> torch.Tensor:
    """Return x [rows, columns] in parts, contiguous: column c is at place c // parts of part c % parts."""
    return x.unflatten(1, (-1, parts)).transpose(1, 2).reshape(x.shape)
