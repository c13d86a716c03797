# SPDX-License-Identifier: Apache-2.0
"""Restores experts' weights in MXFP4 as bfloat16, for grouped GEMMs; experts without tokens are skipped."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mizzen.layers.quantized.canonical import QuantizedWeight

ROWS, BYTES = 32, 128
"""Rows and bytes of codes of a tile."""


@triton.jit
def _decode(codes, scales):
    """Return E2M1 codes times float32 scales, which is exact for normal numbers."""
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    magnitude = tl.where(exponent == 0, mantissa * (126 << 23), normal)
    return (magnitude | ((codes >> 3) << 31)).to(tl.float32, bitcast=True) * scales


@triton.jit
def _dequantize_kernel(
    values, exponents, ends, out, rows, row_bytes, steps,
    STEP: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2)
    start = tl.load(ends + expert - 1, expert > 0, 0)
    if tl.load(ends + expert) > start:
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
        byte = tl.program_id(0) * BYTES + tl.arange(0, BYTES)[None, :]
        inside = (row < rows) & (byte < row_bytes)
        line = expert.to(tl.int64) * rows + row
        packed = tl.load(values + line * row_bytes + byte, inside, 0).to(tl.int32)
        # The two codes of a byte share a scale: a step has an even number of columns.
        exponent = tl.load(exponents + line * steps + byte * 2 // STEP, inside, 0).to(tl.int32)
        bits = tl.where(exponent == 0, 1 << 22, exponent << 23)  # 2 ** -127 is subnormal
        scale = bits.to(tl.float32, bitcast=True)
        low, high = _decode(packed & 15, scale), _decode(packed >> 4, scale)
        weight = tl.interleave(low, high).to(tl.bfloat16)
        column = tl.program_id(0) * 2 * BYTES + tl.arange(0, 2 * BYTES)[None, :]
        written = (row < rows) & (column < 2 * row_bytes)
        tl.store(out + line * (2 * row_bytes) + column, weight, written)


def dequantize_mxfp4(weight: QuantizedWeight, rows: int, ends: torch.Tensor) -> torch.Tensor:
    """Return the weights of experts that have tokens, bfloat16 [experts, rows, columns].

    The weights of other experts are left uninitialised. Values are those of `QuantizedWeight.dequantize`,
    rounded once; only those below bfloat16's normal numbers are not exact.

    Args:
        weight: Weights of all experts, [experts * rows, columns], in E2M1 with a scale in E8M0 for an even
            number of columns of one row.
        rows: Rows of an expert.
        ends: Number of tokens of all experts up to each one, including it, int32 [experts].
    """
    experts, row_bytes = len(ends), weight.values.shape[1]
    out = torch.empty(experts, rows, 2 * row_bytes, dtype=torch.bfloat16, device=weight.values.device)
    grid = (triton.cdiv(row_bytes, BYTES), triton.cdiv(rows, ROWS), experts)
    _dequantize_kernel[grid](
        weight.values,
        weight.scales,
        ends,
        out,
        rows,
        row_bytes,
        weight.scales.shape[1],
        STEP=weight.column_step,
        ROWS=ROWS,
        BYTES=BYTES,
    )
    return out
