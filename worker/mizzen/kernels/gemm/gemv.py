"""The product of one row with a weight matrix, for decodes of a single request, with what surrounds it.

A warp (or several, for long rows) computes one output from weights that it has asked for before it waits for
the kernel ahead of it (programmatic dependent launch, CUDA programming guide 4.5): the weights depend on
nothing, so their way from memory overlaps with the end of what computes the input. On request the input is
added to the residual stream and normalised first (RMSNorm), by every block for itself, and the outputs are
gates and what they multiply (SwiGLU), whose products alone are stored. NVRTC compiles the kernel at start,
for each length of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mizzen.kernels.launch import hopper
from mizzen.kernels.nvrtc import load_kernel, launch, can_compile, read_source

THREADS = 256
WARPS = THREADS // 32
LOADS = 16
"""16-byte loads that a thread has in flight at most."""
SOURCE = read_source("gemm/gemv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """What happens to the input first."""

    scale: torch.Tensor
    """[columns], of the RMSNorm."""
    epsilon: float
    residual: torch.Tensor | None = None
    """[1, columns], added to the input before the norm."""


def warps_for_columns(columns: int, loads: int = LOADS) -> int:
    """Return how many warps compute one output together, so that none holds more than `loads` loads of it."""
    share = 1
    while share < WARPS and columns > 8 * 32 * share * loads:
        share *= 2
    return share


def share_of(columns: int, gate: bool) -> int:
    """Return how many warps compute one output together."""
    return warps_for_columns(columns, LOADS // 2 if gate else LOADS)


def definitions(columns: int, *, gate: bool, norm: bool, add: bool) -> tuple[tuple[str, int], ...]:
    """Return what the kernel is compiled with."""
    share = share_of(columns, gate)
    loads = -(-columns // (8 * 32 * share))
    sizes = (("VECTORS", columns // 8), ("SHARE", share), ("LOADS", loads))
    return (*sizes, ("GATE", int(gate)), ("NORM", int(norm)), ("ADD", int(add)))


def max_columns(gate: bool) -> int:
    """Return how many columns a block can hold in flight."""
    return 8 * 32 * WARPS * (LOADS // 2 if gate else LOADS)


def serves(weight: torch.Tensor, *, gate: bool = False) -> bool:
    """Tell whether `gemv` can run with a weight, and compile it for that; a gate comes on the first use.

    False where the device or the precision is another, or (with a warning) where it cannot be compiled.
    """
    columns = weight.shape[1]
    if not hopper(weight.device) or weight.dtype != torch.bfloat16:
        return False
    if columns % 8 or columns > max_columns(gate):
        return False
    defines = definitions(columns, gate=False, norm=False, add=False)
    return can_compile(SOURCE, "gemv", defines, weight.device, "decodes of one request use general matrix products")


def gemv(
    weight: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    gate: bool = False,
    norm: Norm | None = None,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x [1, columns] times the transpose of weight [rows, columns], both contiguous: [1, rows].

    Args:
        weight: bfloat16; with `gate`, gates and then what they multiply.
        x: The row.
        out: Where the result goes.
        gate: Return silu(gates) * others, [1, rows / 2].
        norm: Add and normalise first.
        after: Where the sum of x and the residual goes, [1, columns], none of the two; with a residual.
    """
    rows, columns = weight.shape
    rows //= 1 + gate
    if out is None:
        out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    add = norm is not None and norm.residual is not None
    defines = definitions(columns, gate=gate, norm=norm is not None, add=add)
    before, scale, epsilon = x, x, 0.0
    if norm is not None:
        scale, epsilon = norm.scale, norm.epsilon
        before = x if norm.residual is None else norm.residual
    function = load_kernel(SOURCE, "gemv", defines, x.device.index or 0)
    per_block = WARPS // share_of(columns, gate)
    arguments = (weight, x, out, rows, before, x if after is None else after, scale, epsilon)
    launch(function, -(-rows // per_block), THREADS, arguments)
    return out
