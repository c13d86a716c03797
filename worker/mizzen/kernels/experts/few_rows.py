# SPDX-License-Identifier: Apache-2.0
"""Products of a few tokens with their experts, for small decode batches: two launches, without alignment.

Such batches are limited by memory bandwidth, and most of their pairs have different experts. Each block reads
a tile of the weight rows of one pair's expert, or of a token's experts; nothing is sorted. The blocks that
work on the same rows of different pairs start together, so that pairs that share an expert find its weights
in the L2 cache. A block has all loads of a tile in flight at once, and the second kernel issues its first
loads before it waits for the first kernel (programmatic dependent launch).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mizzen.kernels.experts.gate import Gate, apply_gate
from mizzen.kernels.launch import pdl_launch_options


@dataclass(frozen=True, slots=True)
class FewRowsTile:
    """Tiling of the two products; the elements of a tile are in registers."""

    rows: int
    """Weight rows per block: pairs of a gate and an up row, or rows of down of each of a token's experts."""
    columns: int
    """Maximum number of columns that are loaded at once, a power of two."""
    warps: int
    """Warps per block."""


@triton.jit
def _gate_up_kernel(
    x, chosen, weight, bias, inner, limit, slope,
    HELD: tl.constexpr, PER_TOKEN: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = row < WIDTH
    if PDL:
        tl.extra.cuda.gdc_wait()
        # After the wait, so that the router has ended when the next kernel starts and reads its choice.
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(chosen + pair)
    if (expert < 0) | (expert >= HELD):
        return
    gate_at = weight + (expert * 2 * WIDTH + row)[:, None] * HIDDEN
    up_at = gate_at + WIDTH * HIDDEN
    x_at = x + pair // PER_TOKEN * HIDDEN
    gate, up = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for start in range(0, HIDDEN, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        within = column < HIDDEN
        both = inside[:, None] & within[None, :]
        gate_rows = tl.load(gate_at + column[None, :], both, 0.0)
        up_rows = tl.load(up_at + column[None, :], both, 0.0)
        # No product can start before x is loaded, and so the weights are in flight as a whole.
        tl.debug_barrier()
        values = tl.load(x_at + column, within, 0.0).to(tl.float32)[None, :]
        gate += tl.sum(gate_rows.to(tl.float32) * values, 1)
        up += tl.sum(up_rows.to(tl.float32) * values, 1)
    if BIAS:
        bias_at = bias + expert * 2 * WIDTH + row
        gate += tl.load(bias_at, inside, 0.0).to(tl.float32)
        up += tl.load(bias_at + WIDTH, inside, 0.0).to(tl.float32)
    value = apply_gate(gate, up, limit, slope, GATE)
    tl.store(inner + pair * WIDTH + row, value.to(inner.dtype.element_ty), inside)


@triton.jit
def _down_kernel(
    inner, chosen, weights, weight, bias, added, out,
    HELD: tl.constexpr, PER_TOKEN: tl.constexpr, PADDED: tl.constexpr, HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = row < HIDDEN
    k = tl.arange(0, PADDED)
    pair = token * PER_TOKEN + k
    # The router has ended, but another kernel may have left older values at these addresses in the L1 cache.
    expert = tl.load(chosen + pair, k < PER_TOKEN, -1, cache_modifier=".cg")
    held = (expert >= 0) & (expert < HELD)
    expert = tl.where(held, expert, 0)
    factor = tl.load(weights + pair, held, 0.0, cache_modifier=".cg")
    weight_row = expert[:, None] * HIDDEN + row[None, :]
    weight_at = (weight + weight_row * WIDTH)[:, :, None]
    needed = (held[:, None] & inside[None, :])[:, :, None]
    column = tl.arange(0, COLUMNS)
    tile = tl.load(weight_at + column[None, None, :], needed & (column < WIDTH)[None, None, :], 0.0)
    outputs = tl.zeros((PADDED, ROWS), tl.float32)
    if BIAS:
        outputs += tl.load(bias + weight_row, held[:, None] & inside[None, :], 0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    inner_at = inner + (pair * WIDTH)[:, None]
    values = tl.load(inner_at + column[None, :], held[:, None] & (column < WIDTH)[None, :], 0.0)
    outputs += tl.sum(tile.to(tl.float32) * values.to(tl.float32)[:, None, :], 2)
    for start in range(COLUMNS, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        within = (column < WIDTH)[None, :]
        tile = tl.load(weight_at + column[None, None, :], needed & within[:, None, :], 0.0)
        tl.debug_barrier()  # see the first kernel
        values = tl.load(inner_at + column[None, :], held[:, None] & within, 0.0)
        outputs += tl.sum(tile.to(tl.float32) * values.to(tl.float32)[:, None, :], 2)
    total = tl.sum(factor[:, None] * outputs, 0)
    if ADD:
        total += tl.load(added + token * HIDDEN + row, inside, 0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + row, total.to(out.dtype.element_ty), inside)


def gate_up_rows(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weight: torch.Tensor,
    gate: Gate,
    tile: FewRowsTile,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each pair's token by gate and up of its expert; return activation(gate) * up, [pairs, width].

    Sums are in float32 and rounded once. Rows of pairs whose expert is outside [0, held) are not written.

    Args:
        x: Inputs [tokens, hidden].
        chosen: Experts of each token, int64 [tokens, per_token].
        weight: Gate rows, then up rows, of each expert, [held, 2 * width, hidden].
        gate: Function of gate and up.
        tile: Tiling.
        bias: Biases of the weight's rows, [held, 2 * width].
    """
    held, width, hidden = weight.shape[0], weight.shape[1] // 2, weight.shape[2]
    inner = torch.empty(chosen.numel(), width, dtype=x.dtype, device=x.device)
    _gate_up_kernel[(chosen.numel(), triton.cdiv(width, tile.rows))](
        x, chosen, weight, weight if bias is None else bias, inner, gate.limit, gate.slope,
        HELD=held, PER_TOKEN=chosen.shape[1], HIDDEN=hidden, WIDTH=width,
        GATE=gate.number, BIAS=bias is not None, ROWS=tile.rows,
        COLUMNS=min(tile.columns, triton.next_power_of_2(hidden)),
        num_warps=tile.warps, **pdl_launch_options(x),
    )  # fmt: skip
    return inner


def down_rows(
    inner: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    weight: torch.Tensor,
    tile: FewRowsTile,
    bias: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply inner elements by down, and return the weighted sum of each token's outputs, [tokens, hidden].

    The kernel must follow `gate_up_rows` directly in the stream, because it reads `chosen` and `weights`
    before it waits. Products and sums are in float32, in an order that does not depend on the batch, and the
    sum is rounded once.

    Args:
        inner: Inner elements of all pairs, [tokens * per_token, width].
        chosen: Experts of each token, int64 [tokens, per_token]; those outside [0, held) contribute nothing.
        weights: Factors of the outputs, float32 of the same shape.
        weight: Down projections [held, hidden, width].
        tile: Tiling.
        bias: Biases of the outputs, [held, hidden].
        added: Tensor [tokens, hidden] to add to the sum.
        dtype: Data type of the sum; that of the inner elements by default.
    """
    (tokens, per_token), (held, hidden, width) = chosen.shape, weight.shape
    out = torch.empty(tokens, hidden, dtype=dtype or inner.dtype, device=inner.device)
    _down_kernel[(tokens, triton.cdiv(hidden, tile.rows))](
        inner, chosen, weights, weight,
        weight if bias is None else bias, out if added is None else added, out,
        HELD=held, PER_TOKEN=per_token, PADDED=triton.next_power_of_2(per_token), HIDDEN=hidden, WIDTH=width,
        BIAS=bias is not None, ADD=added is not None, ROWS=tile.rows,
        COLUMNS=min(tile.columns, triton.next_power_of_2(width)),
        num_warps=tile.warps, **pdl_launch_options(inner),
    )  # fmt: skip
    return out
