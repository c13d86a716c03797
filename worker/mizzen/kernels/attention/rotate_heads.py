# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of queries and keys in place, where they lie next to each other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mizzen.kernels.launch import pdl_launch_options

HEADS_A_PROGRAM = 8


@triton.jit
def _rotate_heads_kernel(
    rows, cos, sin, row_size,
    COUNT: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (column < HALF) & (head < COUNT)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = rows + row * row_size + head * 2 * HALF + column
    left = tl.load(place, inside, 0.0).to(tl.float32)
    right = tl.load(place + HALF, inside, 0.0).to(tl.float32)
    c = tl.load(cos + row * HALF + column, column < HALF, 0.0)
    s = tl.load(sin + row * HALF + column, column < HALF, 0.0)
    tl.store(place, (left * c - right * s).to(rows.dtype.element_ty), inside)
    tl.store(place + HALF, (right * c + left * s).to(rows.dtype.element_ty), inside)


def rotate_heads(rows: torch.Tensor, heads: int, head_dim: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate the first heads of each row in place, in float32.

    Args:
        rows: Rows [tokens, size] whose first `heads * head_dim` elements are heads in half-split layout,
            contiguous.
        heads: Number of heads to rotate, of queries and keys together.
        head_dim: Number of elements of a head.
        cos: Cosines, float32 [tokens, 1, head_dim / 2], contiguous.
        sin: Sines, of the same shape.
    """
    together = min(HEADS_A_PROGRAM, triton.next_power_of_2(heads))
    _rotate_heads_kernel[(len(rows), triton.cdiv(heads, together))](
        rows, cos, sin, rows.shape[1],
        COUNT=heads, HALF=head_dim // 2, HEADS=together, BLOCK=triton.next_power_of_2(head_dim // 2),
        num_warps=2, **pdl_launch_options(rows),
    )  # fmt: skip
