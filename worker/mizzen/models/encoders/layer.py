# SPDX-License-Identifier: Apache-2.0
"""A layer of an encoder: attention to all tokens of a prompt, and a feed-forward block."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from mizzen.layers.activation import ActivationFunction
from mizzen.layers.context import BuildContext
from mizzen.layers.linear import MergedColumnParallelLinear, OutputRows, RowParallelLinear, name_rows
from mizzen.layers.norm import Norm, make_norm
from mizzen.layers.rope import rotate
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.block import NormKind
from mizzen.models.config import ModelConfig
from mizzen.models.encoders.description import EncoderConfig

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int | None], torch.Tensor]
"""Function (q, k, v, window) that computes attention within each prompt of a batch.

q, k and v are [tokens, heads, head_dim]; the result is [tokens, heads * head_dim]. A token attends to
`window` tokens to each side of itself, or to all tokens of its prompt if `window` is None.
"""
Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of rotations, [tokens, 1, head_dim / 2]."""


def make_layer_norm(build: BuildContext, config: ModelConfig, encoder: EncoderConfig, name: str) -> Norm:
    """Make a LayerNorm over the hidden size."""
    return make_norm(
        build, name, config.hidden_size, config.norm_epsilon, NormKind.LAYER, bias=encoder.norm_bias
    )


class EncoderAttention:
    """Attention of one layer, with its output projection."""

    def __init__(self, build: BuildContext, config: ModelConfig, encoder: EncoderConfig, layer: int) -> None:
        names, size = encoder.names, config.heads * config.head_dim
        prefix = f"{names.prefix}{names.layer}.{layer}."
        self.heads = (config.heads, config.head_dim)
        self.window = config.windows[layer]
        rows = name_rows([prefix + name for name in names.query_key_value], [size] * 3, [slice(0, size)] * 3)
        self.qkv_proj = MergedColumnParallelLinear(build, rows, config.hidden_size, config.qkv_bias)
        self.o_proj = RowParallelLinear(
            build, prefix + names.output, config.hidden_size, size, config.output_bias
        )

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        yield from self.qkv_proj.targets()
        yield from self.o_proj.targets()

    def mix_tokens(self, x: torch.Tensor, attend: Attend, angles: Angles | None) -> torch.Tensor:
        """Return the inputs of the output projection, [tokens, hidden], for x [tokens, hidden]."""
        q, k, v = (part.view(-1, *self.heads) for part in self.qkv_proj(x).chunk(3, dim=-1))
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        return attend(q, k, v, self.window)


class EncoderMLP:
    """Feed-forward block of one layer, with or without a gate."""

    def __init__(self, build: BuildContext, config: ModelConfig, encoder: EncoderConfig, layer: int) -> None:
        names, size = encoder.names, config.intermediate_size
        prefix = f"{names.prefix}{names.layer}.{layer}."
        count = len(names.inner)
        rows = name_rows([prefix + name for name in names.inner], [size] * count, [slice(0, size)] * count)
        self.inner = MergedColumnParallelLinear(
            build, self.gate_first(rows, encoder), config.hidden_size, encoder.inner_bias
        )
        self.down = RowParallelLinear(build, prefix + names.down, config.hidden_size, size, config.mlp_bias)
        self.activation = ActivationFunction(build, config.block.activation)
        self.has_gate = encoder.has_gate

    @staticmethod
    def gate_first(rows: list[OutputRows], encoder: EncoderConfig) -> list[OutputRows]:
        """Return the rows of the inner projections in the order gate, up."""
        return rows[::-1] if encoder.up_first else rows

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        yield from self.inner.targets()
        yield from self.down.targets()

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the down projection, [tokens, intermediate], for x [tokens, hidden]."""
        if self.has_gate:
            return self.activation.gate(self.inner(x))
        return self.inner.apply_activation(x, self.activation)


class EncoderLayer:
    """Attention and feed-forward block of one layer, with their residual connections and norms."""

    def __init__(self, build: BuildContext, config: ModelConfig, encoder: EncoderConfig, layer: int) -> None:
        names = encoder.names
        prefix = f"{names.prefix}{names.layer}.{layer}."
        self.norm_first = encoder.norm_first
        self.attention = EncoderAttention(build, config, encoder, layer)
        self.mlp = EncoderMLP(build, config, encoder, layer)
        self.attention_norm = None
        if layer or not encoder.norm_first:
            self.attention_norm = make_layer_norm(build, config, encoder, prefix + names.attention_norm)
        self.mlp_norm = make_layer_norm(build, config, encoder, prefix + names.mlp_norm)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        yield from self.attention.targets()
        yield from self.mlp.targets()
        if self.attention_norm is not None:
            yield from self.attention_norm.targets()
        yield from self.mlp_norm.targets()

    def __call__(self, x: torch.Tensor, attend: Attend, angles: Angles | None) -> torch.Tensor:
        """Return the layer's output [tokens, hidden] for x [tokens, hidden], which may be overwritten."""
        norm, o_proj, down = self.attention_norm, self.attention.o_proj, self.mlp.down
        if self.norm_first or norm is None:
            mixed = self.attention.mix_tokens(x if norm is None else norm(x), attend, angles)
            return x.add_(down(self.mlp.activate(self.mlp_norm.add(o_proj(mixed), x))))
        x = project_add_norm(o_proj, self.attention.mix_tokens(x, attend, angles), x, norm)
        return project_add_norm(down, self.mlp.activate(x), x, self.mlp_norm)


def project_add_norm(
    linear: RowParallelLinear, inner: torch.Tensor, x: torch.Tensor, norm: Norm
) -> torch.Tensor:
    """Return the normalised sum of x [tokens, hidden], which may be overwritten, and linear(inner)."""
    if linear.add_without_bias(x, inner):
        return norm.normalise_shifted(x, linear.method.bias)
    return norm.normalise_sum(linear(inner), x)
