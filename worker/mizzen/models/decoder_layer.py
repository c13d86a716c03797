# SPDX-License-Identifier: Apache-2.0
"""Decoder layers: self-attention and a feed-forward block, one class for each placement of the norms."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mizzen.layers.attention import ForwardContext, SelfAttention
from mizzen.layers.context import BuildContext
from mizzen.layers.experts.sparse_mlp import Mixture, make_mlp
from mizzen.layers.linear import RowParallelLinear
from mizzen.layers.mlp import MLP
from mizzen.layers.norm import Norm, make_norm
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.block import NormPlacement
from mizzen.models.config import ModelConfig

Output = tuple[torch.Tensor | None, torch.Tensor]
"""Two tensors [tokens, hidden]: a layer's output on this rank, to be passed on as the `x` of the next layer,
or None if the residual stream already contains it; and the residual stream."""


class DecoderLayer:
    """Self-attention and a feed-forward block, which add to the residual stream.

    This class has a norm before each of them (`NormPlacement.PRE`); its subclasses have other placements.
    """

    partial_output = True
    """Whether the output must be summed over ranks before it is added to the residual stream."""

    def __init__(self, build: BuildContext, config: ModelConfig, layer: int) -> None:
        block = config.block
        prefix = f"{block.names.prefix}layers.{layer}."
        self.collectives = build.collectives
        self.multiplier = block.residual_multiplier
        self.attention = SelfAttention(build, config, layer, f"{prefix}{block.names.attention}.")
        self.mlp = make_mlp(build, config, layer, prefix)
        if isinstance(self.mlp, MLP):
            self.attention.o_proj.method.set_next(self.mlp.gate_up.method)
        self.norms: dict[str, Norm] = {
            place: make_norm(
                build,
                prefix + name,
                config.hidden_size,
                config.norm_epsilon,
                block.norm,
                bias=block.norm_bias,
            )
            for place, name in self.norm_names(config).items()
        }

    @staticmethod
    def norm_names(config: ModelConfig) -> dict[str, str]:
        """Return the checkpoint's name of the norm at each place of this layer."""
        names = config.block.names
        return {"before_attention": names.attention_norm, "before_mlp": names.mlp_norm}

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        for norm in self.norms.values():
            yield from norm.targets()
        yield from self.attention.targets()
        yield from self.mlp.targets()

    def finish(self) -> None:
        """Prepare the loaded weights for the kernels."""
        for norm in self.norms.values():
            norm.finish()
        self.attention.finish()
        self.mlp.finish()

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply an output x in place by the residual multiplier; return it."""
        return x if self.multiplier == 1 else x.mul_(self.multiplier)

    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        context: ForwardContext,
        rows: torch.Tensor | None = None,
    ) -> Output:
        """Add the previous layer's output to the residual stream, and apply this layer.

        Args:
            x: This rank's output [tokens, hidden] of the previous layer; its sum over ranks is added to the
                residual stream. None in the first layer, or if the stream already contains the sum.
            residual: Residual stream [tokens, hidden]; may be updated in place.
            context: Inputs that all layers share.
            rows: Indices of the tokens to continue with after the attention, int64; None for all.

        Returns:
            This layer's output and the residual stream, for all tokens or for `rows`.
        """
        qkv, residual = self.attention.qkv_proj.apply_after_norm(self.norms["before_attention"], x, residual)
        attended, residual = self.attention(qkv, residual, context, rows)
        x = self.project(self.attention.o_proj, attended, residual)
        middle, residual = self.mlp.apply_after_norm(self.norms["before_mlp"], x, residual)
        return self.project(self.mlp.down, middle, residual), residual

    def add_and_normalise(self, place: str, x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """Add x, if given, to the residual stream in place; return the sum, normalised if `place` has a norm.

        x and the result are [tokens, hidden]. x is the same on all ranks.
        """
        norm = self.norms.get(place)
        if norm is None:
            return residual if x is None else residual.add_(x)
        return norm(residual) if x is None else norm.add(x, residual)

    def project(
        self, linear: RowParallelLinear | Mixture, x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor | None:
        """Apply the last projection of a block to x; return the output, or None if `residual` contains it."""
        if self.multiplier == 1:
            return linear.add_to_residual(residual, x)
        return self.scale(linear(x))


class OutputNormLayer(DecoderLayer):
    """A decoder layer that normalises the outputs of attention and feed-forward block.

    Its outputs are sums over ranks. With `NormPlacement.SANDWICH` it also normalises their inputs.
    """

    partial_output = False

    @staticmethod
    def norm_names(config: ModelConfig) -> dict[str, str]:
        """Return the checkpoint's name of the norm at each place of this layer."""
        names = config.block.names
        outputs = {"after_attention": names.after_attention_norm, "after_mlp": names.after_mlp_norm}
        sandwich = config.block.placement is NormPlacement.SANDWICH
        return DecoderLayer.norm_names(config) | outputs if sandwich else outputs

    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        context: ForwardContext,
        rows: torch.Tensor | None = None,
    ) -> Output:
        """Apply this layer; x is already normalised, and the same on all ranks. See `DecoderLayer`."""
        inputs = self.add_and_normalise("before_attention", x, residual)
        attended, residual = self.attention(self.attention.qkv_proj(inputs), residual, context, rows)
        x = self.normalise_output("after_attention", self.attention.o_proj(attended))
        inputs = self.add_and_normalise("before_mlp", x, residual)
        return self.normalise_output("after_mlp", self.mlp(inputs)), residual

    def normalise_output(self, place: str, x: torch.Tensor) -> torch.Tensor:
        """Sum an output x [tokens, hidden] over ranks; return the sum normalised, and scaled."""
        return self.scale(self.norms[place](self.collectives.all_reduce(x)))


class ParallelLayer(DecoderLayer):
    """A decoder layer whose attention and feed-forward block have the same normalised input."""

    @staticmethod
    def norm_names(config: ModelConfig) -> dict[str, str]:
        """Return the checkpoint's name of the norm at each place of this layer."""
        return {"before_attention": config.block.names.attention_norm}

    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        context: ForwardContext,
        rows: torch.Tensor | None = None,
    ) -> Output:
        """Add the previous layer's output to the residual stream, and apply this layer."""
        x = x if x is None else self.collectives.all_reduce(x)
        inputs = self.add_and_normalise("before_attention", x, residual)
        attended, residual = self.attention(self.attention.qkv_proj(inputs), residual, context, rows)
        inputs = inputs if rows is None else inputs[rows]
        return self.scale(self.attention.o_proj(attended).add_(self.mlp(inputs))), residual


LAYERS: dict[NormPlacement, type[DecoderLayer]] = {
    NormPlacement.PRE: DecoderLayer,
    NormPlacement.POST: OutputNormLayer,
    NormPlacement.SANDWICH: OutputNormLayer,
    NormPlacement.PARALLEL: ParallelLayer,
}
"""Class of the decoder layers for each placement of the norms."""


def make_layer(build: BuildContext, config: ModelConfig, layer: int) -> DecoderLayer:
    """Make the decoder layer number `layer` of a model."""
    return LAYERS[config.block.placement](build, config, layer)
