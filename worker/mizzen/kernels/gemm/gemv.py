# SPDX-License-Identifier: Apache-2.0
"""GEMV (M = 1): one row times a weight matrix, for decode steps of a single request.

One warp (several for long rows) computes one output. It issues its weight loads before it waits for the
previous kernel (programmatic dependent launch, CUDA programming guide 4.5): weights do not depend on that
kernel, so their loads overlap with its end. The kernel can also add the residual to its input and apply
RMSNorm first (every block repeats this work), and apply SwiGLU or add a bias to its outputs. NVRTC compiles
it once for each row length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mizzen.kernels.launch import is_hopper_or_later
from mizzen.kernels.nvrtc import can_compile, launch, load_kernel, read_source

THREADS = 256
WARPS = THREADS // 32
LOADS = 16
"""Maximum number of 16-byte loads that a thread keeps in flight."""
SOURCE = read_source("bf16") + read_source("gemm/gemv")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreNorm:
    """Residual addition and RMSNorm that a GEMM of a single row applies to its input first."""

    scale: torch.Tensor
    """Weight of the RMSNorm, [columns]."""
    epsilon: float
    residual: torch.Tensor | None = None
    """Residual stream [1, columns] that is added to the input before the norm; None for a norm alone."""


def warps_per_row(columns: int, swiglu: bool) -> int:
    """Return the number of warps that compute one output together, so that no thread exceeds `LOADS`."""
    loads = LOADS // 2 if swiglu else LOADS
    warps = 1
    while warps < WARPS and columns > 8 * 32 * warps * loads:
        warps *= 2
    return warps


def compile_definitions(
    columns: int, *, swiglu: bool, norm: bool, add: bool, bias: bool = False
) -> tuple[tuple[str, int], ...]:
    """Return the preprocessor definitions of the kernel for rows of `columns` elements."""
    warps = warps_per_row(columns, swiglu)
    loads = -(-columns // (8 * 32 * warps))
    sizes = (("VECTORS", columns // 8), ("WARPS_PER_ROW", warps), ("LOADS", loads))
    return (*sizes, ("SWIGLU", int(swiglu)), ("NORM", int(norm)), ("ADD", int(add)), ("BIAS", int(bias)))


def max_columns(swiglu: bool) -> int:
    """Return the length in elements of the longest row that a block can keep in flight."""
    return 8 * 32 * WARPS * (LOADS // 2 if swiglu else LOADS)


def supports(weight: torch.Tensor, *, swiglu: bool = False) -> bool:
    """Return whether `gemv` supports a weight [rows, columns]; compile its plain variant to find out.

    The result is False for GPUs before Hopper, for dtypes other than bfloat16 and for unsupported row
    lengths. It is also False, with a warning, if the kernel cannot be compiled. The variants with SwiGLU, a
    norm or a bias are compiled on first use.
    """
    columns = weight.shape[1]
    if not is_hopper_or_later(weight.device) or weight.dtype != torch.bfloat16:
        return False
    if columns % 8 or columns > max_columns(swiglu):
        return False
    defines = compile_definitions(columns, swiglu=False, norm=False, add=False)
    return can_compile(SOURCE, "gemv", defines, weight.device, "decodes of one request fall back to cuBLAS")


def gemv(
    weight: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    swiglu: bool = False,
    norm: PreNorm | None = None,
    new_residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x times the transpose of `weight`, [1, rows]; all tensors are bfloat16 and contiguous.

    Args:
        weight: Weight [rows, columns]; with `swiglu`, gate rows followed by up rows.
        x: Input row [1, columns].
        out: Tensor for the result; by default a new one.
        swiglu: Whether to return silu(gate) * up, [1, rows / 2].
        norm: Residual addition and norm to apply to `x` first.
        new_residual: Tensor [1, columns] for the sum of `x` and the residual; required if `norm` has a
            residual. It must be neither `x` nor the residual itself.
        bias: Bias [rows] to add to the product, in float32; None for none, and not with `swiglu`.

    Raises:
        ValueError: there is a bias and `swiglu`.
    """
    if swiglu and bias is not None:
        raise ValueError("a GEMV with SwiGLU cannot have a bias")
    rows, columns = weight.shape
    rows //= 1 + swiglu
    if out is None:
        out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    add = norm is not None and norm.residual is not None
    defines = compile_definitions(
        columns, swiglu=swiglu, norm=norm is not None, add=add, bias=bias is not None
    )
    residual, scale, epsilon = x, x, 0.0
    if norm is not None:
        scale, epsilon = norm.scale, norm.epsilon
        residual = x if norm.residual is None else norm.residual
    function = load_kernel(SOURCE, "gemv", defines, x.device.index or 0)
    rows_per_block = WARPS // warps_per_row(columns, swiglu)
    new_residual = x if new_residual is None else new_residual
    arguments = (weight, x, out, rows, residual, new_residual, scale, epsilon)
    biases = () if bias is None else (bias,)
    launch(function, -(-rows // rows_per_block), THREADS, (*arguments, *biases))
    return out
