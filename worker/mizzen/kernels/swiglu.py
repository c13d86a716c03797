# SPDX-License-Identifier: Apache-2.0
"""Activations of gates: silu(gate) * up and gelu(gate) * up (arXiv 2002.05202)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mizzen.kernels.launch import pdl_launch_options

BLOCK = 1024


@triton.jit
def _gate_mul_kernel(gate_up, out, size, BLOCK: tl.constexpr, TANH: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up + row * 2 * size + columns, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * size + columns, inside, 0.0).to(tl.float32)
    if TANH:
        # 0.5 * (1 + tanh(z)) equals the sigmoid of 2 z.
        gate = gate / (1 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        gate = gate / (1 + tl.exp(-gate))
    value = gate * up
    tl.store(out + row * size + columns, value.to(out.dtype.element_ty), inside)


def gate_mul(gate_up: torch.Tensor, *, tanh: bool = False) -> torch.Tensor:
    """Return activation(gate) * up, [rows, size], for gate and up together, [rows, 2 * size] (contiguous).

    The activation is SiLU, or with `tanh` GELU in its tanh approximation.
    """
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(size, BLOCK))
    _gate_mul_kernel[grid](gate_up, out, size, BLOCK=BLOCK, TANH=tanh, num_warps=4, **pdl_launch_options(out))
    return out
