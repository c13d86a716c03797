# SPDX-License-Identifier: Apache-2.0
"""Products of tokens with quantized experts by the kernels of unquantized ones, which decode weights."""

from __future__ import annotations

import torch

from mizzen.kernels.experts.align import align_pairs
from mizzen.kernels.experts.codes import KINDS as CODES
from mizzen.kernels.experts.few_coded_rows import down_coded_rows, gate_up_coded_rows
from mizzen.kernels.experts.gate import KINDS
from mizzen.kernels.experts.grouped_coded import (
    down_grouped_coded,
    gate_up_grouped_coded,
    put_in_parts,
)
from mizzen.kernels.experts.matrices import CodedMatrices
from mizzen.kernels.experts.weighted_sum import sum_pairs
from mizzen.kernels.launch import has_wgmma
from mizzen.layers.experts.coded_kernel_plans import find_plan
from mizzen.layers.experts.kernel_plans import (
    ExpertKernelPlan,
    ExpertSizes,
    FewRows,
    Grouped,
    Library,
    Variant,
)
from mizzen.layers.experts.kernel_product import make_gate
from mizzen.layers.experts.products import ExpertProduct
from mizzen.layers.experts.quantized_stack import QuantizedExperts
from mizzen.layers.experts.stored_weights import StoredExpertWeights
from mizzen.layers.linear_methods.base import GateActivation


class CodedKernelProduct:
    """Multiplies tokens by quantized experts with kernels that a plan chooses by the size of the batch.

    Results are as those of `KernelProduct`: the same in all batches that use the same variant.
    """

    def __init__(
        self,
        weights: StoredExpertWeights,
        activation: GateActivation,
        library: ExpertProduct,
        *,
        experts: int,
        plan: ExpertKernelPlan,
    ) -> None:
        """Keep loaded weights, whose codes are not copied.

        Args:
            weights: Weights that `supports` accepts.
            activation: Activation function of the gate.
            library: The product with the same weights that runs batches of the variant `Library`.
            experts: Number of experts of the layer, including those of other ranks.
            plan: Variants by size.
        """
        self.gate_up, self.down = make_coded(weights.gate_up), make_coded(weights.down)
        self.gate, self.plan, self.library = make_gate(activation), plan, library
        self.dtype = weights.dtype
        self.sizes = ExpertSizes(experts, self.down.rows, self.down.columns)
        biases = weights.biases
        self.gate_up_bias = None if biases is None else biases.gate_up
        self.down_bias = None if biases is None else biases.down

    @staticmethod
    def supports(weights: StoredExpertWeights, activation: GateActivation) -> bool:
        """Return whether the kernels support the device, codes and sizes of loaded weights, and the gate."""
        return activation.kind in KINDS and all(
            has_wgmma(experts.weight.values.device) and can_decode(experts)
            for experts in (weights.gate_up, weights.down)
        )

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return this rank's sums of outputs, float32 [tokens, hidden]; see `ExpertProduct`."""
        return self.run(x, chosen, weights, dtype=torch.float32)

    def run(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        *,
        added: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        variant: Variant | None = None,
    ) -> torch.Tensor:
        """Return this rank's sums of outputs [tokens, hidden]; see `KernelProduct.run`."""
        tokens, per_token = chosen.shape
        x, chosen, weights = x.contiguous(), chosen.contiguous(), weights.contiguous()
        dtype, experts = dtype or x.dtype, self.down.experts
        match variant or self.plan.variant(tokens, per_token, self.sizes):
            case FewRows(gate_up, down):
                inner = gate_up_coded_rows(x, chosen, self.gate_up, self.gate, gate_up, self.gate_up_bias)
                return down_coded_rows(inner, chosen, weights, self.down, down, self.down_bias, added, dtype)
            case Grouped(gate_up, down):
                inputs = put_in_parts(x, self.gate_up.parts)
                aligned = align_pairs(chosen, experts, gate_up.rows)
                inner = gate_up_grouped_coded(
                    inputs,
                    per_token,
                    aligned,
                    self.gate_up,
                    self.gate,
                    gate_up,
                    self.gate_up_bias,
                    out_parts=self.down.parts,
                )
                outputs = down_grouped_coded(inner, aligned, self.down, down, self.down_bias)
                return sum_pairs(outputs, chosen, weights, experts, added, dtype)
            case Library():
                total = self.library(x, chosen, weights)
                return (total if added is None else total.add_(added)).to(dtype)

    def compile(self, per_token: int, *, adds: bool) -> None:
        """Compile the kernels of all variants, for tokens with that many experts; see `KernelProduct`."""
        device = self.down.values.device
        x = torch.zeros(1, self.down.rows, dtype=self.dtype, device=device)
        none = torch.full((1, per_token), self.down.experts, dtype=torch.int64, device=device)
        weights = torch.zeros(1, per_token, device=device)
        for variant in self.plan.variants:
            self.run(x, none, weights, added=x if adds else None, variant=variant)


def make_coded_product(
    weights: StoredExpertWeights,
    activation: GateActivation,
    library: ExpertProduct,
    *,
    experts: int,
) -> CodedKernelProduct | None:
    """Make a product with loaded weights; see `CodedKernelProduct`.

    Returns:
        The product; None if the kernels do not support the device, the format, the sizes or the gate, or if
        no plan for the format has been measured.
    """
    if not CodedKernelProduct.supports(weights, activation):
        return None
    if (plan := find_plan(weights.gate_up.weight, weights.down.weight)) is None:
        return None
    return CodedKernelProduct(weights, activation, library, experts=experts, plan=plan)


def can_decode(experts: QuantizedExperts) -> bool:
    """Return whether the kernels can decode the weights of a projection."""
    return experts.weight.codes in CODES and experts.orders is None and make_coded(experts).supported


def make_coded(experts: QuantizedExperts) -> CodedMatrices:
    """Return the weights of a projection in the form that the kernels take; codes are not copied."""
    weight = experts.weight
    return CodedMatrices(
        codes=weight.codes,
        values=weight.values.view(torch.uint8),
        scales=weight.scales.contiguous(),
        zeros=None if weight.zeros is None else weight.zeros.contiguous(),
        rows=experts.rows,
        columns=weight.columns,
        row_step=weight.row_step,
        column_step=weight.column_step,
    )
