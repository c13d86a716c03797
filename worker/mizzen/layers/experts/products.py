# SPDX-License-Identifier: Apache-2.0
"""Products of tokens with the experts that a router has chosen for them.

All products are the same function of each token, whatever other tokens are in the batch, up to the rounding
of the GEMMs. They differ in speed, and in the devices and data types that they support. A rank may hold only
some of the experts, and padding has none: choices of other experts, and of none, contribute nothing to the
sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from mizzen.layers.experts.biases import ExpertBiases
from mizzen.layers.linear_methods.base import GateActivation

ALIGNMENT = 8
"""Number of bfloat16 elements that lie in 16 bytes, the alignment of rows that grouped GEMMs need."""
GROUPED_CAPABILITY = (9, 0)
"""Compute capability from which PyTorch has a grouped GEMM that needs no synchronisation with the host."""

Biases = Sequence[torch.Tensor | None]
"""Bias of each expert; None for no bias."""


class ExpertProduct(Protocol):
    """Runs tokens through their experts, and sums the weighted outputs."""

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return this rank's sums of outputs, float32 [tokens, hidden].

        Args:
            x: Inputs [tokens, hidden].
            chosen: Indices of each token's experts in the weights of this rank, int64
                [tokens, experts per token]; the number of these weights stands for an expert of another rank,
                or for no expert.
            weights: Factors of their outputs, float32 of the same shape.
        """
        ...


class SingleExperts:
    """Multiplies by the weights of one expert at a time."""

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        activation: GateActivation,
        biases: ExpertBiases | None = None,
    ) -> None:
        """Keep the weights `gate_up` [experts, 2 * width, hidden] and `down` [experts, hidden, width]."""
        self.gate_up, self.down, self.activation = gate_up, down, activation
        self.gate_up_bias, self.down_bias = split_biases(biases, len(down))
        self.experts = len(down)

    def run_expert(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        """Return the outputs [rows, hidden] of one expert for its inputs [rows, hidden]."""
        gate_up = F.linear(rows, self.gate_up[expert], self.gate_up_bias[expert])
        return F.linear(self.activation.gate(gate_up), self.down[expert], self.down_bias[expert])


class SortedProduct(SingleExperts):
    """Sorts pairs of token and expert by expert, and multiplies the tokens of one expert at a time.

    The numbers of tokens must be known to the host, so that a GPU would have to be synchronised.
    """

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return this rank's sums of outputs, float32 [tokens, hidden]; see `ExpertProduct`."""
        pairs = chosen.flatten()
        order = pairs.argsort(stable=True)
        rows, outputs = x[order // chosen.shape[1]], x.new_empty(len(order), x.shape[1])
        start = 0
        for expert, count in enumerate(pairs.bincount(minlength=self.experts)[: self.experts].tolist()):
            if count:
                part = slice(start, start + count)
                outputs[part] = self.run_expert(rows[part], expert)
                start += count
        outputs[start:] = 0
        return sum_outputs(outputs, order, weights)


class GroupedProduct:
    """Sorts pairs of token and expert by expert, and multiplies all of them in one grouped GEMM.

    The numbers of tokens stay on the device, so that a CUDA graph can capture the product. Pairs without an
    expert of this rank are sorted last, behind the end of the last GEMM.
    """

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        activation: GateActivation,
        biases: ExpertBiases | None = None,
    ) -> None:
        """Keep the weights `gate_up` [experts, 2 * width, hidden] and `down` [experts, hidden, width]."""
        self.gate_up, self.down = gate_up.transpose(1, 2), down.transpose(1, 2)
        self.activation, self.biases = activation, biases
        self.experts = torch.arange(len(down), device=down.device)

    @staticmethod
    def supports(gate_up: torch.Tensor, down: torch.Tensor) -> bool:
        """Return whether the weights have a type, a device and sizes that the grouped GEMM takes."""
        return supports_grouped_gemm(gate_up.device, gate_up.dtype, *gate_up.shape[1:], *down.shape[1:])

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return this rank's sums of outputs, float32 [tokens, hidden]; see `ExpertProduct`."""
        pairs, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(pairs, self.experts, right=True, out_int32=True)
        gate_up = F.grouped_mm(x[order // chosen.shape[1]], self.find_gate_up(ends), offs=ends)
        owners = pairs if self.biases is None else pairs.clamp(max=len(self.experts) - 1)
        if self.biases is not None:
            gate_up.add_(self.biases.gate_up[owners])
        outputs = F.grouped_mm(self.activation.gate(gate_up), self.find_down(ends), offs=ends)
        if self.biases is not None and self.biases.down is not None:
            outputs.add_(self.biases.down[owners])
        # The GEMMs do not write rows behind their ends, which may hold anything.
        outputs.masked_fill_((pairs == len(self.experts))[:, None], 0)
        return sum_outputs(outputs, order, weights)

    def find_gate_up(self, ends: torch.Tensor) -> torch.Tensor:
        """Return the transposed weights of gate and up [experts, hidden, 2 * width].

        `ends` are the numbers of pairs up to each expert, int32 [experts]. Experts without pairs may have any
        weights.
        """
        return self.gate_up

    def find_down(self, ends: torch.Tensor) -> torch.Tensor:
        """Return the transposed weights of the down projections [experts, width, hidden]."""
        return self.down


class MaskedProduct(SingleExperts):
    """Multiplies all tokens by every expert, and gives the outputs of experts not chosen the weight 0.

    It is slow, but works with all types and sizes without the host knowing the choice.
    """

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return this rank's sums of outputs, float32 [tokens, hidden]; see `ExpertProduct`."""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(self.experts):
            hits = chosen == expert
            outputs = self.run_expert(x, expert).mul((weights * hits).sum(-1, keepdim=True))
            # An output that is not finite must not reach tokens that did not choose the expert.
            total.add_(outputs.where(hits.any(-1, keepdim=True), 0))
        return total


def supports_grouped_gemm(device: torch.device, dtype: torch.dtype, *sizes: int) -> bool:
    """Return whether PyTorch's grouped GEMM takes weights of a data type and of these sizes on a device."""
    return (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device) >= GROUPED_CAPABILITY
        and not any(size % ALIGNMENT for size in sizes)
    )


def sum_outputs(outputs: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each token's outputs, float32 [tokens, hidden].

    A token's outputs are added one by one, in the order of its experts: its sum is the same in any batch.

    Args:
        outputs: Outputs [pairs, hidden] of all pairs of token and expert, sorted by expert.
        order: Index of each output's pair, int64 [pairs]; pair i is that of token i // experts per token.
        weights: Factors of the outputs, float32 [tokens, experts per token].
    """
    tokens, per_token = weights.shape
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    places = places.view(tokens, per_token)
    total = torch.zeros((tokens, outputs.shape[1]), dtype=torch.float32, device=outputs.device)
    for k in range(per_token):
        total.addcmul_(outputs[places[:, k]], weights[:, k : k + 1])
    return total


def split_biases(biases: ExpertBiases | None, experts: int) -> tuple[Biases, Biases]:
    """Return each expert's bias of gate and up, and its bias of the down projection; None for no bias."""
    none = [None] * experts
    if biases is None:
        return none, none
    return list(biases.gate_up), none if biases.down is None else list(biases.down)


def make_product(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: GateActivation,
    biases: ExpertBiases | None = None,
) -> ExpertProduct:
    """Make the fastest product for the device, type and sizes of the experts' weights.

    Args:
        gate_up: Gate and up projections [experts, 2 * width, hidden].
        down: Down projections [experts, hidden, width].
        activation: Activation function of the gate.
        biases: Biases of the projections, if they have any.
    """
    if not gate_up.is_cuda:
        return SortedProduct(gate_up, down, activation, biases)
    if GroupedProduct.supports(gate_up, down):
        return GroupedProduct(gate_up, down, activation, biases)
    return MaskedProduct(gate_up, down, activation, biases)
