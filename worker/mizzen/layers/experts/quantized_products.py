# SPDX-License-Identifier: Apache-2.0
"""Products of tokens with quantized experts; see `mizzen.layers.experts.products`."""

from __future__ import annotations

import torch

from mizzen.layers.experts.products import ExpertProduct, MaskedProduct, SortedProduct
from mizzen.layers.experts.quantized_weights import QuantizedExpertWeights
from mizzen.layers.linear_methods.base import GateActivation


class DequantizedExperts:
    """Dequantizes one expert after the other for each batch."""

    def __init__(self, weights: QuantizedExpertWeights, activation: GateActivation) -> None:
        """Keep the weights, which may be loaded later."""
        self.weights, self.activation = weights, activation
        self.experts = weights.config.count

    def run_expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Return the outputs [tokens, hidden] of one expert for x [tokens, hidden]."""
        inner = self.activation.gate(self.weights.gate_up.multiply(x, expert))
        return self.weights.down.multiply(inner, expert)


class SortedDequantizedProduct(DequantizedExperts, SortedProduct):
    """Dequantizes only experts that were chosen; the host must know the choice, as on CPUs."""


class MaskedDequantizedProduct(DequantizedExperts, MaskedProduct):
    """Dequantizes all experts. It is slow, but works with all formats without the host knowing the choice."""


def make_quantized_product(
    weights: QuantizedExpertWeights, activation: GateActivation, device: torch.device
) -> ExpertProduct:
    """Make the fastest product for the device and the format of the experts' weights.

    Args:
        weights: The experts' weights, which may be loaded later.
        activation: Activation function of the gate.
        device: Device of the weights.
    """
    if device.type != "cuda":
        return SortedDequantizedProduct(weights, activation)
    return MaskedDequantizedProduct(weights, activation)
