# SPDX-License-Identifier: Apache-2.0
"""Products of tokens with quantized experts; see `mizzen.layers.experts.products`."""

from __future__ import annotations

import torch

from mizzen.layers.experts.mxfp4_weights import Mxfp4ExpertWeights
from mizzen.layers.experts.products import (
    ExpertProduct,
    GroupedProduct,
    MaskedProduct,
    SortedProduct,
    split_biases,
    supports_grouped_gemm,
)
from mizzen.layers.experts.quantized_stack import QuantizedExperts
from mizzen.layers.experts.quantized_weights import QuantizedExpertWeights
from mizzen.layers.experts.stored_weights import StoredExpertWeights
from mizzen.layers.linear_methods.base import GateActivation


class DequantizedExperts:
    """Dequantizes one expert after the other for each batch."""

    def __init__(self, weights: StoredExpertWeights, activation: GateActivation) -> None:
        """Keep the weights, which may be loaded later."""
        self.weights, self.activation = weights, activation
        self.experts = weights.own_count
        self.gate_up_bias, self.down_bias = split_biases(weights.biases, self.experts)

    def run_expert(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        """Return the outputs [rows, hidden] of one expert for its inputs [rows, hidden]."""
        gate_up = self.weights.gate_up.multiply(rows, expert, self.gate_up_bias[expert])
        return self.weights.down.multiply(self.activation.gate(gate_up), expert, self.down_bias[expert])


class SortedDequantizedProduct(DequantizedExperts, SortedProduct):
    """Dequantizes only experts that were chosen; the host must know the choice, as on CPUs."""


class MaskedDequantizedProduct(DequantizedExperts, MaskedProduct):
    """Dequantizes all experts. It is slow, but works with all formats without the host knowing the choice."""


class GroupedMxfp4Product(GroupedProduct):
    """Restores the experts of a batch as bfloat16 for grouped GEMMs.

    Temporary memory is that of all experts of one projection in bfloat16, but only chosen ones are written.
    """

    def __init__(self, weights: Mxfp4ExpertWeights, activation: GateActivation, device: torch.device) -> None:
        """Keep the weights, which may be loaded later."""
        self.weights, self.activation, self.biases = weights, activation, weights.biases
        self.experts = torch.arange(weights.own_count, device=device)

    @staticmethod
    def suits(weights: Mxfp4ExpertWeights, device: torch.device) -> bool:
        """Return whether the weights have sizes and a data type that the grouped GEMM takes on a device."""
        width = weights.shard.stop - weights.shard.start
        return supports_grouped_gemm(device, weights.dtype, width, weights.hidden)

    def find_gate_up(self, ends: torch.Tensor) -> torch.Tensor:
        """Return the transposed weights of gate and up [experts, hidden, 2 * width]."""
        return restore(self.weights.gate_up, ends)

    def find_down(self, ends: torch.Tensor) -> torch.Tensor:
        """Return the transposed weights of the down projections [experts, width, hidden]."""
        return restore(self.weights.down, ends)


def restore(experts: QuantizedExperts, ends: torch.Tensor) -> torch.Tensor:
    """Return the transposed weights of experts that have pairs, bfloat16 [experts, columns, rows]."""
    from mizzen.kernels.quantization.dequantize_mxfp4 import dequantize_mxfp4

    return dequantize_mxfp4(experts.weight, experts.rows, ends).transpose(1, 2)


def make_quantized_product(
    weights: StoredExpertWeights, activation: GateActivation, device: torch.device, *, fused: bool
) -> ExpertProduct:
    """Make the fastest product for the device and the format of the experts' weights.

    Args:
        weights: The experts' weights, which may be loaded later.
        activation: Activation function of the gate.
        device: Device of the weights.
        fused: Whether fused kernels may compute the product; otherwise PyTorch operations do.
    """
    if device.type != "cuda":
        return SortedDequantizedProduct(weights, activation)
    if isinstance(weights, Mxfp4ExpertWeights) and GroupedMxfp4Product.suits(weights, device):
        return GroupedMxfp4Product(weights, activation, device)
    from mizzen.kernels.launch import is_hopper_or_later

    if fused and isinstance(weights, QuantizedExpertWeights) and is_hopper_or_later(device):
        from mizzen.layers.experts.quantized_kernel_product import GroupedQuantizedProduct

        return GroupedQuantizedProduct(weights, activation)
    return MaskedDequantizedProduct(weights, activation)
