# SPDX-License-Identifier: Apache-2.0
"""Products of tokens with the experts that a router has chosen for them.

All products are the same function of each token, whatever other tokens are in the batch, up to the rounding
of the GEMMs. They differ in speed, and in the devices and data types that they support. A rank may hold only
some of the experts: choices of others contribute nothing to its sums.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from mizzen.layers.linear_methods.base import GateActivation

ALIGNMENT = 8
"""Number of bfloat16 elements that lie in 16 bytes, the alignment of rows that grouped GEMMs need."""
GROUPED_CAPABILITY = (9, 0)
"""Compute capability from which PyTorch has a grouped GEMM that needs no synchronisation with the host."""


class ExpertProduct(Protocol):
    """Runs tokens through their experts, and sums the weighted outputs."""

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return this rank's sums of outputs, float32 [tokens, hidden].

        Args:
            x: Inputs [tokens, hidden].
            chosen: Indices of each token's experts in the weights of this rank, int64
                [tokens, experts per token]; the number of these weights stands for an expert of another rank.
            weights: Factors of their outputs, float32 of the same shape.
        """
        ...


class SortedProduct:
    """Sorts pairs of token and expert by expert, and multiplies the tokens of one expert at a time.

    The numbers of tokens must be known to the host, so that a GPU would have to be synchronised.
    """

    def __init__(
        self, gate_up: torch.Tensor, down: torch.Tensor, activation: GateActivation, *, partial: bool = False
    ) -> None:
        """Keep the weights `gate_up` [experts, 2 * width, hidden] and `down` [experts, hidden, width].

        `partial` says that other ranks hold further experts.
        """
        self.gate_up, self.down, self.activation = gate_up, down, activation
        self.partial = partial

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return this rank's sums of outputs, float32 [tokens, hidden]; see `ExpertProduct`."""
        pairs = chosen.flatten()
        order = pairs.argsort(stable=True)
        rows, outputs = x[order // chosen.shape[1]], x.new_empty(len(order), x.shape[1])
        start = 0
        for expert, count in enumerate(pairs.bincount(minlength=len(self.down))[: len(self.down)].tolist()):
            if count:
                part = slice(start, start + count)
                inner = self.activation.gate(F.linear(rows[part], self.gate_up[expert]))
                outputs[part] = F.linear(inner, self.down[expert])
                start += count
        return sum_outputs(outputs, order, weights, chosen == len(self.down) if self.partial else None)


class GroupedProduct:
    """Sorts pairs of token and expert by expert, and multiplies all of them in one grouped GEMM.

    The numbers of tokens stay on the device, so that a CUDA graph can capture the product. Pairs with experts
    of other ranks are sorted last, behind the end of the last GEMM.
    """

    def __init__(
        self, gate_up: torch.Tensor, down: torch.Tensor, activation: GateActivation, *, partial: bool = False
    ) -> None:
        """Keep the weights `gate_up` [experts, 2 * width, hidden] and `down` [experts, hidden, width].

        `partial` says that other ranks hold further experts.
        """
        self.gate_up, self.down = gate_up.transpose(1, 2), down.transpose(1, 2)
        self.activation, self.partial = activation, partial
        self.experts = torch.arange(len(down), device=down.device)

    @staticmethod
    def supports(gate_up: torch.Tensor, down: torch.Tensor) -> bool:
        """Return whether the weights have a type, a device and sizes that the grouped GEMM takes."""
        sizes = (*gate_up.shape[1:], *down.shape[1:])
        return (
            gate_up.is_cuda
            and gate_up.dtype == torch.bfloat16
            and torch.cuda.get_device_capability(gate_up.device) >= GROUPED_CAPABILITY
            and not any(size % ALIGNMENT for size in sizes)
        )

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return this rank's sums of outputs, float32 [tokens, hidden]; see `ExpertProduct`."""
        pairs, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(pairs, self.experts, right=True, out_int32=True)
        gate_up = F.grouped_mm(x[order // chosen.shape[1]], self.gate_up, offs=ends)
        outputs = F.grouped_mm(self.activation.gate(gate_up), self.down, offs=ends)
        return sum_outputs(outputs, order, weights, chosen == len(self.down) if self.partial else None)


class MaskedProduct:
    """Multiplies all tokens by every expert, and gives the outputs of experts not chosen the weight 0.

    It is slow, but works with all types and sizes without the host knowing the choice.
    """

    def __init__(
        self, gate_up: torch.Tensor, down: torch.Tensor, activation: GateActivation, *, partial: bool = False
    ) -> None:
        """Keep the weights `gate_up` [experts, 2 * width, hidden] and `down` [experts, hidden, width].

        `partial` says that other ranks hold further experts, which makes no difference here.
        """
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return this rank's sums of outputs, float32 [tokens, hidden]; see `ExpertProduct`."""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(len(self.down)):
            hits = chosen == expert
            inner = self.activation.gate(F.linear(x, self.gate_up[expert]))
            outputs = F.linear(inner, self.down[expert]).mul((weights * hits).sum(-1, keepdim=True))
            # An output that is not finite must not reach tokens that did not choose the expert.
            total.add_(outputs.where(hits.any(-1, keepdim=True), 0))
        return total


def sum_outputs(
    outputs: torch.Tensor, order: torch.Tensor, weights: torch.Tensor, foreign: torch.Tensor | None
) -> torch.Tensor:
    """Return the weighted sum of each token's outputs, float32 [tokens, hidden].

    A token's outputs are added one by one, in the order of its experts: its sum is the same in any batch.

    Args:
        outputs: Outputs [pairs, hidden] of all pairs of token and expert, sorted by expert.
        order: Index of each output's pair, int64 [pairs]; pair i is that of token i // experts per token.
        weights: Factors of the outputs, float32 [tokens, experts per token].
        foreign: Pairs whose expert another rank holds, bool [tokens, experts per token]; their outputs may
            hold anything, and are left out. None if this rank holds all experts.
    """
    tokens, per_token = weights.shape
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    places = places.view(tokens, per_token)
    total = torch.zeros((tokens, outputs.shape[1]), dtype=torch.float32, device=outputs.device)
    for k in range(per_token):
        terms = outputs[places[:, k]]
        if foreign is not None:
            terms.masked_fill_(foreign[:, k : k + 1], 0)
        total.addcmul_(terms, weights[:, k : k + 1])
    return total


def make_product(
    gate_up: torch.Tensor, down: torch.Tensor, activation: GateActivation, *, partial: bool = False
) -> ExpertProduct:
    """Make the fastest product for the device, type and sizes of the experts' weights.

    Args:
        gate_up: Gate and up projections [experts, 2 * width, hidden].
        down: Down projections [experts, hidden, width].
        activation: Activation function of the gate.
        partial: Whether other ranks hold further experts.
    """
    if not gate_up.is_cuda:
        return SortedProduct(gate_up, down, activation, partial=partial)
    if GroupedProduct.supports(gate_up, down):
        return GroupedProduct(gate_up, down, activation, partial=partial)
    return MaskedProduct(gate_up, down, activation, partial=partial)
