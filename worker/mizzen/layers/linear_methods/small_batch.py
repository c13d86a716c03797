# SPDX-License-Identifier: Apache-2.0
"""Unquantized weights with Mizzen's own GEMMs where these are faster than cuBLAS.

The GEMMs in `mizzen.kernels.gemm` serve the small batches of decode steps (GEMV for one row, small-M and
swap-AB GEMMs for more). Another GEMM serves prefills: it computes the gate-up projection and SwiGLU in one
kernel. All else uses cuBLAS.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from mizzen.layers.linear_methods.base import GateActivation, InputNorm, LinearKind, LinearSpec
from mizzen.layers.linear_methods.unquantized import UnquantizedLinear
from mizzen.models.block import Activation

if TYPE_CHECKING:
    from mizzen.kernels.gemm.gemv import PreNorm
    from mizzen.kernels.nvrtc import KernelSpec

MAX_BATCH_BEFORE_ATTENTION = ((8 << 20, 64), (256 << 20, 48))
"""Pairs (elements, rows): for weights of up to `elements` elements, a column-parallel layer uses the
small-batch kernels without SwiGLU for up to `rows` rows of x. The first pair that fits applies. For more rows
or larger weights, cuBLAS is faster, as measured in whole steps."""
MAX_NORM_COLUMNS = 2048
"""Maximum number of elements in an input row; for longer rows, the norm is not fused into the GEMV.

In the fused kernel, every block normalises the whole row. Longer rows use a separate norm kernel.
"""


class SmallBatchLinear(UnquantizedLinear):
    """Unquantized weights with Mizzen's own GEMMs for small batches, which can include norm and SwiGLU."""

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__(spec)
        bias = spec.bias
        # Heads with biases classify whole batches of prompts; nothing compiles kernels for them at start-up.
        excluded = bias and spec.kind is LinearKind.HEAD
        self.max_batch = 0 if excluded else max_small_batch(self.weight)
        """Maximum number of rows in a batch that uses the small-batch kernels; 0 if no batch uses them."""
        self.max_swiglu_batch = 0 if bias else max_small_batch(self.weight, swiglu=True)
        """Maximum number of rows in a batch that uses small-batch kernels with fused SwiGLU; 0 if no batch
        uses them."""
        self.supports_prefill_swiglu = not bias and supports_prefill_swiglu(self.weight)
        self.fuses_prefill_swiglu = self.supports_prefill_swiglu
        """Whether large batches use the fused gate-up SwiGLU kernel wherever it is faster."""
        self.defer_pdl = spec.kind is LinearKind.COLUMN
        """Whether the next kernel must not start early; see `mizzen.kernels.gemm.swap_ab.swap_ab_gemm`."""
        if spec.kind is LinearKind.COLUMN:
            size = spec.rows * spec.columns
            max_batch = next((rows for weights, rows in MAX_BATCH_BEFORE_ATTENTION if size <= weights), 0)
            self.max_batch = min(self.max_batch, max_batch)

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [tokens, columns]; return [tokens, rows], in `out` if given."""
        if len(x) <= self.max_batch and (out is None or out.is_contiguous()):
            return small_batch_gemm(self.weight, x, out, defer_pdl=self.defer_pdl, bias=self.bias)
        return super().apply(x, out)

    def apply_glu(self, x: torch.Tensor, activation: GateActivation) -> torch.Tensor:
        """Multiply x [tokens, columns] by gate and up; return activation(gate) * up, [tokens, rows / 2].

        The weight holds the gate rows followed by the up rows.
        """
        if activation.kind is Activation.SILU:
            if len(x) <= self.max_swiglu_batch:
                return small_batch_gemm(self.weight, x, None, swiglu=True)
            if self.fuses_prefill_swiglu and (out := prefill_swiglu(self.weight, x)) is not None:
                return out
            return activation.gate(super().apply(x))
        return super().apply_glu(x, activation)

    def kernel_specs(
        self, batch_sizes: Iterable[int], *, activation: GateActivation | None = None
    ) -> set[KernelSpec]:
        """Return the specs of the kernels for these batch sizes.

        With a SwiGLU `activation`, the result also contains the spec of the prefill kernel if this layer uses
        that kernel.
        """
        swiglu = activation is not None and activation.kind is Activation.SILU
        max_batch = self.max_swiglu_batch if swiglu else self.max_batch
        specs = gemm_kernel_specs(
            self.weight,
            batch_sizes,
            max_batch,
            swiglu=swiglu,
            defer_pdl=self.defer_pdl and not swiglu,
            bias=self.bias is not None,
        )
        if not swiglu or not self.fuses_prefill_swiglu:
            return specs
        from mizzen.kernels.gemm.gate_up_swiglu import kernel_spec

        return specs | {kernel_spec()}

    def set_prefill_fusion(self, enabled: bool) -> None:
        """Allow or forbid the fused gate-up SwiGLU kernel of large batches."""
        self.fuses_prefill_swiglu = enabled and self.supports_prefill_swiglu

    def apply_after_norm(
        self,
        norm: InputNorm,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        activation: GateActivation | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Add x to the residual stream, normalise the sum and multiply by the weights, all in one kernel.

        Only a single token has such a kernel; see `LinearMethod.apply_after_norm`.
        """
        swiglu = activation is not None
        if len(residual) != 1 or not self.max_batch or self.weight.shape[1] > MAX_NORM_COLUMNS:
            return None
        if not fuses(norm, activation) or (swiglu and self.bias is not None):
            return None
        from mizzen.kernels.gemm.gemv import gemv

        row, pre_norm, new_residual = prepare_norm(norm, x, residual)
        out = gemv(self.weight, row, swiglu=swiglu, norm=pre_norm, new_residual=new_residual, bias=self.bias)
        return out, residual if new_residual is None else new_residual


def fuses(norm: InputNorm, activation: GateActivation | None) -> bool:
    """Return whether the GEMMs of a single row can include a norm before, and an activation behind them."""
    return norm.fusible and (activation is None or activation.kind is Activation.SILU)


def prepare_norm(
    norm: InputNorm, x: torch.Tensor | None, residual: torch.Tensor
) -> tuple[torch.Tensor, PreNorm, torch.Tensor | None]:
    """Return the arguments of a GEMM of one row that adds x to the residual stream and normalises the sum.

    x and `residual` are [1, columns]. Without x, the residual stream itself is normalised.

    Returns:
        The input of the GEMM, the norm, and an uninitialised tensor for the sum; None without x.
    """
    from mizzen.kernels.gemm.gemv import PreNorm

    if x is None:
        return residual, PreNorm(scale=norm.weight, epsilon=norm.epsilon), None
    added = PreNorm(scale=norm.weight, epsilon=norm.epsilon, residual=residual)
    return x, added, torch.empty_like(residual)


def gemm_kernel_specs(
    weight: torch.Tensor,
    batch_sizes: Iterable[int],
    max_batch: int,
    *,
    swiglu: bool = False,
    defer_pdl: bool = False,
    bias: bool = False,
) -> set[KernelSpec]:
    """Return the specs of the swap-AB kernels that `small_batch_gemm` uses for these batch sizes.

    Other kernels are left out, because they compile fast. Batch sizes above `max_batch` are ignored.
    """
    from mizzen.kernels.gemm import small_m, swap_ab

    (rows, columns), max_small_m = weight.shape, small_m.max_batch(weight)
    swap_ab_sizes = (size for size in batch_sizes if max_small_m < size <= max_batch)
    return swap_ab.kernel_specs(rows, columns, swap_ab_sizes, swiglu=swiglu, defer_pdl=defer_pdl, bias=bias)


def max_small_batch(weight: torch.Tensor, *, swiglu: bool = False) -> int:
    """Return the maximum number of rows in a batch that should use `small_batch_gemm` instead of cuBLAS.

    `weight` is [rows, columns]. The result is 0 if `small_batch_gemm` does not support the weight.
    """
    if weight.device.type != "cuda":
        return 0
    from mizzen.kernels.gemm import gemv, small_m, swap_ab
    from mizzen.kernels.launch import has_wgmma

    if not gemv.supports(weight, swiglu=swiglu):
        return 0
    max_swap_ab = swap_ab.max_batch(weight, swiglu=swiglu) if has_wgmma(weight.device) else 0
    return max(small_m.max_batch(weight), max_swap_ab)


def supports_prefill_swiglu(weight: torch.Tensor) -> bool:
    """Return whether `prefill_swiglu` supports a weight [rows, columns]."""
    if weight.device.type != "cuda":
        return False
    from mizzen.kernels.gemm import gate_up_swiglu, gemv
    from mizzen.kernels.launch import has_wgmma

    return gemv.supports(weight, swiglu=True) and has_wgmma(weight.device) and gate_up_swiglu.supports(weight)


def prefill_swiglu(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """Multiply x [tokens, columns] by gate and up in one kernel; return silu(gate) * up, [tokens, rows / 2].

    Do nothing and return None if that would be slower than separate kernels.
    """
    from mizzen.kernels.gemm import gate_up_swiglu

    if not gate_up_swiglu.is_faster(len(weight), len(x), gate_up_swiglu.concurrent_clusters(x.device)):
        return None
    return gate_up_swiglu.gate_up_swiglu(weight, x)


def small_batch_gemm(
    weight: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor | None,
    *,
    swiglu: bool = False,
    defer_pdl: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply a small batch x [tokens, columns] by the transpose of `weight` [rows, columns].

    The result is [tokens, rows], in `out` if given; with `swiglu`, it is silu(gate) * up, [tokens, rows / 2].
    Without `swiglu`, a `bias` [rows] may be added. All tensors are bfloat16 and contiguous. Only
    `mizzen.kernels.gemm.swap_ab` honours `defer_pdl`; the kernels for fewer rows always let the next kernel
    start early.
    """
    from mizzen.kernels.gemm import gemv, small_m, swap_ab

    if len(x) == 1:
        return gemv.gemv(weight, x, out, swiglu=swiglu, bias=bias)
    if len(x) <= small_m.max_batch(weight):
        return small_m.small_m_gemm(weight, x, out, swiglu=swiglu, bias=bias)
    return swap_ab.swap_ab_gemm(weight, x, out, swiglu=swiglu, defer_pdl=defer_pdl, bias=bias)
