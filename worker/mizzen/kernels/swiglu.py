"""SwiGLU activation: silu(gate) * up (arXiv 2002.05202)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mizzen.kernels.launch import pdl_launch_options

BLOCK = 1024


@triton.jit
def _silu_mul_kernel(gate_up, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up + row * 2 * size + columns, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * size + columns, inside, 0.0).to(tl.float32)
    value = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * size + columns, value.to(out.dtype.element_ty), inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [rows, size], for gate and up concatenated as [rows, 2 * size] (contiguous)."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(size, BLOCK))
    _silu_mul_kernel[grid](gate_up, out, size, BLOCK=BLOCK, num_warps=4, **pdl_launch_options(out))
    return out
