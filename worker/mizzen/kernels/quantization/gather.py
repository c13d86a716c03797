# SPDX-License-Identifier: Apache-2.0
"""Gathers input columns in the order of a weight's columns (activation order)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mizzen.kernels.launch import pdl_launch_options

BLOCK = 1024


@triton.jit
def _gather_kernel(x, x_stride, order, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    source = tl.load(order + columns, inside, 0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row * x_stride + source, inside, 0.0)
    tl.store(out + row * size + columns, value, inside)


def gather_columns(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return x[:, order], [tokens, len(order)]; x is [tokens, columns] with strided rows, `order` int32."""
    size = len(order)
    out = torch.empty((len(x), size), dtype=x.dtype, device=x.device)
    grid = (len(x), triton.cdiv(size, BLOCK))
    _gather_kernel[grid](x, x.stride(0), order, out, size, BLOCK=BLOCK, num_warps=4, **pdl_launch_options(x))
    return out
