# SPDX-License-Identifier: Apache-2.0
"""Product of tokens with quantized experts by grouped GEMMs that dequantize weights in registers."""

from __future__ import annotations

import torch

from mizzen.kernels.experts.align import align_pairs
from mizzen.kernels.experts.matrices import ExpertMatrices
from mizzen.kernels.experts.quantized_gemm import choose_block, multiply_pairs
from mizzen.kernels.experts.weighted_sum import sum_pairs
from mizzen.layers.experts.quantized_stack import QuantizedExperts
from mizzen.layers.experts.quantized_weights import QuantizedExpertWeights
from mizzen.layers.linear_methods.base import GateActivation


class GroupedQuantizedProduct:
    """Multiplies all pairs of token and expert in grouped GEMMs; the experts must not have biases.

    The numbers of tokens stay on the device, so that a CUDA graph can capture the product.
    """

    def __init__(self, weights: QuantizedExpertWeights, activation: GateActivation) -> None:
        """Keep the weights, which may be loaded later."""
        self.weights, self.activation = weights, activation
        self.matrices: tuple[ExpertMatrices, ExpertMatrices] | None = None

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return this rank's sums of outputs, float32 [tokens, hidden]; see `ExpertProduct`."""
        if self.matrices is None:
            self.matrices = make_matrices(self.weights.gate_up), make_matrices(self.weights.down)
        gate_up, down = self.matrices
        x, chosen, weights = x.contiguous(), chosen.contiguous(), weights.contiguous()
        pairs, experts = chosen.numel(), gate_up.experts
        aligned = align_pairs(chosen, experts, choose_block(pairs, experts))
        inner = self.activation.gate(multiply_pairs(x, gate_up, aligned, pairs, chosen.shape[1]))
        outputs = multiply_pairs(inner, down, aligned, pairs, 1)
        return sum_pairs(outputs, chosen, weights, experts, dtype=torch.float32)


def make_matrices(experts: QuantizedExperts) -> ExpertMatrices:
    """Return the weights of a projection in the form that the kernels take; codes are not copied."""
    weight = experts.weight
    return ExpertMatrices(
        codes=weight.codes,
        values=weight.values.view(torch.uint8),
        scales=weight.scales.contiguous(),
        zeros=None if weight.zeros is None else weight.zeros.contiguous(),
        orders=experts.orders,
        rows=experts.rows,
        columns=weight.columns,
        row_step=weight.row_step,
        column_step=weight.column_step,
    )
