# SPDX-License-Identifier: Apache-2.0
"""A layer of a vision tower: attention without causal mask and a feed-forward block, after norms."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mizzen.layers.activation import ActivationFunction
from mizzen.layers.context import BuildContext
from mizzen.layers.linear import MergedColumnParallelLinear, RowParallelLinear, name_rows
from mizzen.layers.norm import Norm, make_norm
from mizzen.layers.rope import rotate
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.block import NormKind
from mizzen.models.vision.config import VisionConfig
from mizzen.models.vision.positions import Angles
from mizzen.models.vision.windows import Segments, attend_in_segments


def make_tower_norm(build: BuildContext, config: VisionConfig, name: str) -> Norm:
    """Make a norm over the tower's hidden size; LayerNorms have a bias."""
    return make_norm(
        build,
        name,
        config.hidden_size,
        config.norm_epsilon,
        config.norm,
        bias=config.norm is NormKind.LAYER,
    )


def merged_linear(
    build: BuildContext, names: list[str], size: int, columns: int, bias: bool
) -> MergedColumnParallelLinear:
    """Make one linear layer of several with `size` output rows each."""
    count = len(names)
    return MergedColumnParallelLinear(
        build, name_rows(names, [size] * count, [slice(0, size)] * count), columns, bias
    )


class VisionAttention:
    """Attention of one layer, with its output projection."""

    def __init__(self, build: BuildContext, config: VisionConfig, prefix: str) -> None:
        names, hidden = config.names, config.hidden_size
        self.heads = (config.heads, config.head_dim)
        self.qkv_proj = merged_linear(
            build, [prefix + name for name in names.query_key_value], hidden, hidden, config.qkv_bias
        )
        self.o_proj = RowParallelLinear(build, prefix + names.output, hidden, hidden, config.output_bias)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        yield from self.qkv_proj.targets()
        yield from self.o_proj.targets()

    def __call__(self, x: torch.Tensor, angles: Angles | None, segments: Segments) -> torch.Tensor:
        """Return the attention's output [tokens, hidden] for x [tokens, hidden]; rotations are in float32."""
        q, k, v = (part.view(-1, *self.heads) for part in self.qkv_proj(x).chunk(3, dim=-1))
        if angles is not None:
            q, k = (rotate(part.float(), *angles).to(x.dtype) for part in (q, k))
        return self.o_proj(attend_in_segments(q, k, v, segments))


class VisionMLP:
    """Feed-forward block of one layer, with or without a gate."""

    def __init__(self, build: BuildContext, config: VisionConfig, prefix: str) -> None:
        names, size = config.names, config.intermediate_size
        self.inner = merged_linear(
            build, [prefix + name for name in names.inner], size, config.hidden_size, config.mlp_bias
        )
        self.down = RowParallelLinear(build, prefix + names.down, config.hidden_size, size, config.mlp_bias)
        self.activation = ActivationFunction(build, config.activation)
        self.has_gate = len(names.inner) == 2

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        yield from self.inner.targets()
        yield from self.down.targets()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output [tokens, hidden] for x [tokens, hidden]."""
        inner = self.inner(x)
        return self.down(self.activation.gate(inner) if self.has_gate else self.activation(inner))


class VisionBlock:
    """Attention and feed-forward block of one layer, with their residual connections and norms."""

    def __init__(self, build: BuildContext, config: VisionConfig, layer: int) -> None:
        prefix = f"{config.names.prefix}{config.names.layer}.{layer}."
        self.attention_norm = make_tower_norm(build, config, prefix + config.names.attention_norm)
        self.attention = VisionAttention(build, config, prefix)
        self.mlp_norm = make_tower_norm(build, config, prefix + config.names.mlp_norm)
        self.mlp = VisionMLP(build, config, prefix)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        for part in (self.attention_norm, self.attention, self.mlp_norm, self.mlp):
            yield from part.targets()

    def __call__(self, x: torch.Tensor, angles: Angles | None, segments: Segments) -> torch.Tensor:
        """Return the layer's output [tokens, hidden] for x [tokens, hidden], as a new tensor."""
        x = x + self.attention(self.attention_norm(x), angles, segments)
        return x.add_(self.mlp(self.mlp_norm(x)))
