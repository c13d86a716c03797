# SPDX-License-Identifier: Apache-2.0
"""Products of a few tokens with quantized experts: the kernels of `few_rows`, which decode weights in
registers.

Codes are multiplied by inputs in float32, the products of the columns that share a scale are summed, and the
sum is multiplied by the scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mizzen.kernels.experts.codes import decode_scale, decode_scaled
from mizzen.kernels.experts.few_rows import FewRowsTile
from mizzen.kernels.experts.gate import Gate, apply_gate
from mizzen.kernels.experts.matrices import ExpertMatrices
from mizzen.kernels.launch import pdl_launch_options


@triton.jit
def _load_inputs(x, byte, within, PER_BYTE: tl.constexpr):
    """Return the inputs of the low and of the high codes of bytes, float32; they are equal for one code."""
    if PER_BYTE == 1:
        low = tl.load(x + byte, within, 0.0).to(tl.float32)
        high = low
    elif x.dtype.element_ty == tl.bfloat16:
        pairs = tl.load(x.to(tl.pointer_type(tl.int32), bitcast=True) + byte, within, 0)
        low = (pairs << 16).to(tl.float32, bitcast=True)
        high = (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        low = tl.load(x + 2 * byte, within, 0.0).to(tl.float32)
        high = tl.load(x + 2 * byte + 1, within, 0.0).to(tl.float32)
    return low, high


@triton.jit
def _rescale(values, KIND: tl.constexpr):
    """Multiply by the square root of the power of two by which decoded codes are too small."""
    if KIND == 0:
        values *= 1152921504606846976.0  # 2 ** 60
    elif KIND == 4:
        values *= 9223372036854775808.0  # 2 ** 63
    return values


@triton.jit
def _multiply(codes, low, high, KIND: tl.constexpr, PER_BYTE: tl.constexpr, ZEROS: tl.constexpr):
    """Return the sum of each byte's codes times their inputs, without the power of two of `_rescale`."""
    # The inputs get half of the power of two, so that neither the products nor the sums are subnormal.
    low, high, bits = _rescale(low, KIND), _rescale(high, KIND), codes.to(tl.int32)
    if PER_BYTE == 1:
        products = decode_scaled(bits, KIND, ZEROS) * low
    else:
        products = decode_scaled(bits & 15, KIND, ZEROS) * low
        products += decode_scaled(bits >> 4, KIND, ZEROS) * high
    return products


@triton.jit
def _sum_rows(
    products, inputs, scale_at, zero_at, group, inside,
    KIND: tl.constexpr, PER_BYTE: tl.constexpr, STEP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Return the sums of products [rows, bytes], times the scales of their columns, float32 [rows].

    `inputs` [bytes] are the sums of each byte's inputs, `group` the number of the tile's first scale.
    """
    ROWS: tl.constexpr = products.shape[0]
    BYTES: tl.constexpr = products.shape[1]
    SHARE: tl.constexpr = STEP // PER_BYTE if STEP // PER_BYTE < BYTES else BYTES
    GROUPS: tl.constexpr = BYTES // SHARE
    sums = _rescale(tl.sum(tl.reshape(products, (ROWS, GROUPS, SHARE)), 2), KIND)
    number = group + tl.arange(0, GROUPS)
    wanted = inside[:, None] & (number < SCALES)[None, :]
    if ZEROS:
        zero = tl.load(zero_at[:, None] + number[None, :], wanted, 0).to(tl.float32)
        sums -= zero * tl.sum(tl.reshape(inputs, (GROUPS, SHARE)), 1)[None, :]
    scale = decode_scale(tl.load(scale_at[:, None] + number[None, :], wanted, 0), tl.float32)
    return tl.sum(sums * scale, 1)


@triton.jit
def _gate_up_kernel(
    x, chosen, values, scales, zeros, bias, inner, limit, slope,
    HELD: tl.constexpr, PER_TOKEN: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr, PER_BYTE: tl.constexpr,
    ROW_STEP: tl.constexpr, STEP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    LINE: tl.constexpr = HIDDEN // PER_BYTE
    BYTES: tl.constexpr = COLUMNS // PER_BYTE
    GROUP: tl.constexpr = STEP if STEP > 0 else COLUMNS
    pair = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = row < WIDTH
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # see `few_rows`
    expert = tl.load(chosen + pair)
    if (expert < 0) | (expert >= HELD):
        return
    gate_row = expert * 2 * WIDTH + row
    up_row = gate_row + WIDTH
    gate_scale, up_scale = gate_row // ROW_STEP * SCALES, up_row // ROW_STEP * SCALES
    gate_at = values + gate_row[:, None] * LINE
    up_at = gate_at + WIDTH * LINE
    x_at = x + pair // PER_TOKEN * HIDDEN
    gate, up = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for start in range(0, LINE, BYTES):
        byte = start + tl.arange(0, BYTES)
        within = byte < LINE
        both = inside[:, None] & within[None, :]
        gate_codes = tl.load(gate_at + byte[None, :], both, 0)
        up_codes = tl.load(up_at + byte[None, :], both, 0)
        # No product can start before x is loaded, and so the weights are in flight as a whole.
        tl.debug_barrier()
        low, high = _load_inputs(x_at, byte, within, PER_BYTE)
        inputs = low + high if PER_BYTE == 2 else low
        group = start * PER_BYTE // STEP if STEP > 0 else 0
        products = _multiply(gate_codes, low[None, :], high[None, :], KIND, PER_BYTE, ZEROS)
        gate += _sum_rows(
            products, inputs, scales + gate_scale, zeros + gate_scale, group, inside,
            KIND, PER_BYTE, GROUP, SCALES, ZEROS,
        )  # fmt: skip
        products = _multiply(up_codes, low[None, :], high[None, :], KIND, PER_BYTE, ZEROS)
        up += _sum_rows(
            products, inputs, scales + up_scale, zeros + up_scale, group, inside,
            KIND, PER_BYTE, GROUP, SCALES, ZEROS,
        )  # fmt: skip
    if BIAS:
        gate += tl.load(bias + gate_row, inside, 0.0).to(tl.float32)
        up += tl.load(bias + up_row, inside, 0.0).to(tl.float32)
    value = apply_gate(gate, up, limit, slope, GATE)
    tl.store(inner + pair * WIDTH + row, value.to(inner.dtype.element_ty), inside)


@triton.jit
def _down_kernel(
    inner, chosen, weights, values, scales, zeros, bias, added, out,
    HELD: tl.constexpr, PER_TOKEN: tl.constexpr, PADDED: tl.constexpr, HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, KIND: tl.constexpr, PER_BYTE: tl.constexpr,
    ROW_STEP: tl.constexpr, STEP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    LINE: tl.constexpr = WIDTH // PER_BYTE
    BYTES: tl.constexpr = COLUMNS // PER_BYTE
    GROUP: tl.constexpr = STEP if STEP > 0 else COLUMNS
    token = tl.program_id(0).to(tl.int64)
    # Lines are the rows of the first expert, then those of the second, and so on.
    line = tl.arange(0, PADDED * ROWS)
    k, row = line // ROWS, tl.program_id(1) * ROWS + line % ROWS
    pair = token * PER_TOKEN + k
    # The router has ended, but another kernel may have left older values at these addresses in the L1 cache.
    expert = tl.load(chosen + pair, k < PER_TOKEN, -1, cache_modifier=".cg")
    held = (expert >= 0) & (expert < HELD)
    expert = tl.where(held, expert, 0)
    factor = tl.load(weights + pair, held, 0.0, cache_modifier=".cg")
    weight_row = expert * HIDDEN + row
    scale_row = weight_row // ROW_STEP * SCALES
    needed = held & (row < HIDDEN)
    codes_at = values + weight_row[:, None] * LINE
    byte = tl.arange(0, BYTES)
    codes = tl.load(codes_at + byte[None, :], needed[:, None] & (byte < LINE)[None, :], 0)
    outputs = tl.zeros((PADDED * ROWS,), tl.float32)
    if BIAS:
        outputs += tl.load(bias + weight_row, needed, 0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    inner_at = inner + (pair * WIDTH)[:, None]
    for start in tl.static_range(0, LINE, BYTES):
        byte = start + tl.arange(0, BYTES)
        within = needed[:, None] & (byte < LINE)[None, :]
        if start > 0:
            codes = tl.load(codes_at + byte[None, :], within, 0)
            tl.debug_barrier()  # see the first kernel
        low, high = _load_inputs(inner_at, byte[None, :], within, PER_BYTE)
        group = start * PER_BYTE // STEP if STEP > 0 else 0
        products = _multiply(codes, low, high, KIND, PER_BYTE, ZEROS)
        if ZEROS:
            # Each expert has other inputs, and so the zero points belong to the products.
            number = tl.minimum(byte * PER_BYTE // GROUP, SCALES - 1)
            zero = tl.load(zeros + scale_row[:, None] + number[None, :], needed[:, None], 0).to(tl.float32)
            products -= zero * (low + high if PER_BYTE == 2 else low)
        outputs += _sum_rows(
            products, byte, scales + scale_row, zeros, group, needed, KIND, PER_BYTE, GROUP, SCALES, False
        )
    total = tl.sum(tl.reshape(factor * outputs, (PADDED, ROWS)), 0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if ADD:
        total += tl.load(added + token * HIDDEN + row, row < HIDDEN, 0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + row, total.to(out.dtype.element_ty), row < HIDDEN)


def gate_up_coded_rows(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weight: ExpertMatrices,
    gate: Gate,
    tile: FewRowsTile,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each pair's token by gate and up of its expert; see `few_rows.gate_up_rows`."""
    width, scales, zeros = weight.rows // 2, weight.scales, weight.zeros
    inner = torch.empty(chosen.numel(), width, dtype=x.dtype, device=x.device)
    _gate_up_kernel[(chosen.numel(), triton.cdiv(width, tile.rows))](
        x, chosen, weight.values, scales, scales if zeros is None else zeros, x if bias is None else bias,
        inner, gate.limit, gate.slope, HELD=weight.experts, PER_TOKEN=chosen.shape[1], HIDDEN=weight.columns,
        WIDTH=width, GATE=gate.number, BIAS=bias is not None, **weight.constants, ROWS=tile.rows,
        COLUMNS=min(tile.columns, triton.next_power_of_2(weight.columns)),
        num_warps=tile.warps, **pdl_launch_options(x),
    )  # fmt: skip
    return inner


def down_coded_rows(
    inner: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    weight: ExpertMatrices,
    tile: FewRowsTile,
    bias: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply inner elements by down, and return the weighted sum of each token's outputs, [tokens, hidden].

    See `few_rows.down_rows`; the kernel must follow `gate_up_coded_rows` directly in the stream.
    """
    (tokens, per_token), hidden = chosen.shape, weight.rows
    scales, zeros = weight.scales, weight.zeros
    out = torch.empty(tokens, hidden, dtype=dtype or inner.dtype, device=inner.device)
    _down_kernel[(tokens, triton.cdiv(hidden, tile.rows))](
        inner, chosen, weights, weight.values, scales, scales if zeros is None else zeros,
        inner if bias is None else bias, out if added is None else added, out,
        HELD=weight.experts, PER_TOKEN=per_token, PADDED=triton.next_power_of_2(per_token), HIDDEN=hidden,
        WIDTH=weight.columns, BIAS=bias is not None, ADD=added is not None, **weight.constants,
        ROWS=tile.rows, COLUMNS=min(tile.columns, triton.next_power_of_2(weight.columns)),
        num_warps=tile.warps, **pdl_launch_options(inner),
    )  # fmt: skip
    return out
