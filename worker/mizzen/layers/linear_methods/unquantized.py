# SPDX-License-Identifier: Apache-2.0
"""Unquantized weights, multiplied by PyTorch's GEMMs (cuBLAS on a GPU)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from mizzen.layers.linear_methods.base import (
    ElementwiseActivation,
    LinearMethod,
    LinearSpec,
    list_bias_targets,
    list_weight_targets,
)
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.block import Activation

FUSED_ACTIVATIONS = (Activation.GELU, Activation.GELU_TANH)
"""Activation functions that cuBLAS computes at the end of a GEMM, before outputs are rounded.

It computes the tanh approximation of GELU, which differs from GELU by less than 5e-4. A separate kernel for
GELU is less accurate in bfloat16, because its inputs are rounded: their errors are up to 2^-9 of them."""


class UnquantizedLinear(LinearMethod):
    """Unquantized weights: `weight` [rows, columns] and an optional `bias` [rows], in the model's dtype."""

    def __init__(self, spec: LinearSpec) -> None:
        self.spec = spec
        self.weight = torch.empty(spec.rows, spec.columns, dtype=spec.dtype, device=spec.device)
        self.bias = torch.empty(spec.rows, dtype=spec.dtype, device=spec.device) if spec.bias else None

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the weights and biases of all parts."""
        yield from list_weight_targets(self.spec.parts, self.weight)
        yield from list_bias_targets(self.spec, self.bias)

    def permute_rows(self, order: torch.Tensor) -> None:
        """Replace output row i by row order[i] (int64 [rows])."""
        self.weight.copy_(self.weight[order])
        if self.bias is not None:
            self.bias.copy_(self.bias[order])

    def scale_rows(self, rows: slice, factor: float, *, bias: bool = True) -> None:
        """Multiply the weights of output rows, and with `bias` their biases too, by a power of two."""
        self.weight[rows].mul_(factor)
        if bias and self.bias is not None:
            self.bias[rows].mul_(factor)

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [tokens, columns]; return [tokens, rows], in `out` if given."""
        if out is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def apply_activation(self, x: torch.Tensor, activation: ElementwiseActivation) -> torch.Tensor:
        """Multiply x [tokens, columns]; return the activation function of the outputs [tokens, rows]."""
        fuses = activation.fused and activation.kind in FUSED_ACTIVATIONS and x.dtype is torch.bfloat16
        if not fuses or self.bias is None or x.device.type != "cuda":
            return super().apply_activation(x, activation)
        return torch.ops.aten._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)

    def add_to_residual(self, residual: torch.Tensor, x: torch.Tensor) -> bool:
        """Multiply x [tokens, columns] without the bias, and add the product to `residual` in place."""
        torch.addmm(residual, x, self.weight.t(), out=residual)
        return True
