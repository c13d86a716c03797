# SPDX-License-Identifier: Apache-2.0
"""Torch modules that put Mizzen's sharded layers in the places of Transformers' modules.

Their inputs are [1, tokens, size]. They hold no torch parameters: `targets` yields their weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from mizzen.layers.activation import ActivationFunction
from mizzen.layers.embedding import Head, TiedHead, TokenEmbedding
from mizzen.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from mizzen.layers.linear_methods.base import LinearMethod
from mizzen.layers.norm import RMSNorm
from mizzen.layers.weight_target import WeightTarget
from mizzen.parallel.collectives import Collectives


class Replacement(nn.Module):
    """Base class of modules whose weights are loaded through targets."""

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        return iter(())

    def finish(self) -> None:
        """Prepare the loaded weights for the kernels."""

    def methods(self) -> Iterator[LinearMethod]:
        """Yield the linear methods, whose kernels may have to be compiled."""
        return iter(())


class LinearModule(Replacement):
    """Base class of modules with one linear layer of Mizzen."""

    def __init__(self, linear: MergedColumnParallelLinear | RowParallelLinear) -> None:
        super().__init__()
        self.linear = linear

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        yield from self.linear.targets()

    def finish(self) -> None:
        """Prepare the loaded weights for the kernels."""
        self.linear.method.finish()

    def methods(self) -> Iterator[LinearMethod]:
        """Yield the linear method."""
        yield self.linear.method


class LinearGroup(LinearModule):
    """Linear layers with the same input; each rank holds a shard of their output rows.

    `members` has a module for each layer. The first of them that is called computes all outputs in one GEMM;
    the others then return their shares of the result, if their input is the same tensor.
    """

    def __init__(self, linear: MergedColumnParallelLinear, sizes: Sequence[int]) -> None:
        """Wrap a merged layer; `sizes` are the numbers of output rows of its members on this rank."""
        super().__init__(linear)
        self.members = [LinearGroupMember(self, index) for index in range(len(sizes))]
        self.sizes = list(sizes)
        self.input: torch.Tensor | None = None
        self.outputs: list[torch.Tensor | None] = []

    def output(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Return the output [1, tokens, size] of a member for x [1, tokens, columns]."""
        if self.input is not x or self.outputs[index] is None:
            out = apply_flat(self.linear, x)
            self.input, self.outputs = x, list(out.split(self.sizes, dim=-1))
        result, self.outputs[index] = self.outputs[index], None
        if not any(output is not None for output in self.outputs):
            self.input = None
        if result is None:
            raise RuntimeError("a merged projection has no result")
        return result


class LinearGroupMember(nn.Module):
    """One of the layers of a `LinearGroup`."""

    def __init__(self, group: LinearGroup, index: int) -> None:
        super().__init__()
        self._group = (group,)  # in a tuple, so that torch does not register it several times
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [1, tokens, columns] by this layer's weights."""
        return self._group[0].output(x, self.index)


class ColumnLinear(LinearModule):
    """A linear layer; each rank holds a shard of its output rows, or all of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., columns] by the weights; return this rank's outputs [..., rows]."""
        return apply_flat(self.linear, x)


class RowLinear(LinearModule):
    """A linear layer; each rank holds a shard of its input columns, and outputs are summed over ranks."""

    def __init__(self, linear: RowParallelLinear, collectives: Collectives) -> None:
        super().__init__(linear)
        self.collectives = collectives

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., columns of this rank] by the weights; return the sum over ranks [..., rows]."""
        return self.collectives.all_reduce(apply_flat(self.linear, x))


class GatedMLP(Replacement):
    """Feed-forward block down(activation(gate(x)) * up(x)), with gate and up in one GEMM."""

    def __init__(
        self,
        gate_up: MergedColumnParallelLinear,
        down: RowParallelLinear | MergedColumnParallelLinear,
        activation: ActivationFunction,
        collectives: Collectives | None,
    ) -> None:
        """Wrap the layers; without `collectives`, each rank holds the whole block."""
        super().__init__()
        self.gate_up, self.down, self.activation = gate_up, down, activation
        self.collectives = collectives

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to x [..., hidden]."""
        middle = self.gate_up(x.reshape(-1, x.shape[-1]).contiguous(), self.activation)
        out = self.down(middle).view(*x.shape[:-1], -1)
        return out if self.collectives is None else self.collectives.all_reduce(out)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        yield from self.gate_up.targets()
        yield from self.down.targets()

    def finish(self) -> None:
        """Prepare the loaded weights for the kernels."""
        self.gate_up.method.finish()
        self.down.method.finish()

    def methods(self) -> Iterator[LinearMethod]:
        """Yield the method of the last projection; `TransformersModel` handles that of gate and up."""
        yield self.down.method


class NormModule(Replacement):
    """RMSNorm over the last dimension."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., size], normalised."""
        return self.norm(x.reshape(-1, x.shape[-1]).contiguous()).view(x.shape)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destination of the weight."""
        yield from self.norm.targets()

    def finish(self) -> None:
        """Turn the loaded weight into the factor."""
        self.norm.finish()


class EmbeddingModule(Replacement):
    """Token embedding, sharded by the vocabulary."""

    def __init__(self, embedding: TokenEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    @property
    def weight(self) -> torch.Tensor:
        """Rows of this rank."""
        return self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up token ids [1, tokens]; return [1, tokens, hidden]."""
        return self.embedding(tokens.view(-1)).view(*tokens.shape, -1)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destination of the table."""
        yield from self.embedding.targets()


class HeadModule(Replacement):
    """Output head, sharded by the vocabulary."""

    def __init__(self, head: Head | TiedHead) -> None:
        super().__init__()
        self.head = head
        self.out: torch.Tensor | None = None
        """Tensor for the next result; None makes a new one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [1, rows, vocab] for x [1, rows, hidden]."""
        out, self.out = self.out, None
        return self.head(x.reshape(-1, x.shape[-1]), out)[None]

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destination of the table, unless it belongs to the embedding."""
        yield from self.head.targets()

    def finish(self) -> None:
        """Prepare the loaded weights for the kernels."""
        self.head.finish()


def apply_flat(linear: MergedColumnParallelLinear | RowParallelLinear, x: torch.Tensor) -> torch.Tensor:
    """Apply a layer for inputs [tokens, columns] to x [..., columns]."""
    return linear(x.reshape(-1, x.shape[-1]).contiguous()).view(*x.shape[:-1], -1)
