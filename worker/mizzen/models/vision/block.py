# SPDX-License-Identifier: Apache-2.0
"""A layer of a vision tower: attention without causal mask and a feed-forward block, after norms."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from mizzen.attention.segments import Attend
from mizzen.layers.activation import ActivationFunction
from mizzen.layers.context import BuildContext
from mizzen.layers.linear import MergedColumnParallelLinear, RowParallelLinear, name_rows
from mizzen.layers.linear_methods.unquantized import UnquantizedLinear
from mizzen.layers.norm import Norm, make_norm
from mizzen.layers.rope import rotate
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.block import NormKind
from mizzen.models.vision.config import VisionConfig
from mizzen.models.vision.positions import Angles

GEMM_UNIT = 8
"""Number that should divide the sizes of 16-bit matrices: GEMMs read 16 bytes at once."""
PADDED_UNIT = 64
"""Number that divides sizes after padding: elements of a row in a tile of GEMMs."""


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
        self.fused = build.fused
        self.qkv_proj = merged_linear(
            build, [prefix + name for name in names.query_key_value], hidden, hidden, config.qkv_bias
        )
        self.o_proj = RowParallelLinear(build, prefix + names.output, hidden, hidden, config.output_bias)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        yield from self.qkv_proj.targets()
        yield from self.o_proj.targets()

    def __call__(self, x: torch.Tensor, angles: Angles | None, attend: Attend) -> torch.Tensor:
        """Return the attention's output [tokens, hidden] for x [tokens, hidden]; rotations are in float32."""
        qkv = self.qkv_proj(x)
        heads, head_dim = self.heads
        if angles is not None and self.fused:
            from mizzen.kernels.attention.rotate_heads import rotate_heads

            rotate_heads(qkv, 2 * heads, head_dim, *angles)
        q, k, v = qkv.view(-1, 3, heads, head_dim).unbind(1)
        if angles is not None and not self.fused:
            q, k = (rotate(part.float(), *angles).to(x.dtype) for part in (q, k))
        return self.o_proj(attend(q, k, v))


class VisionMLP:
    """Feed-forward block of one layer, with or without a gate."""

    def __init__(self, build: BuildContext, config: VisionConfig, prefix: str) -> None:
        names, size = config.names, config.intermediate_size
        self.inner = merged_linear(
            build, [prefix + name for name in names.inner], size, config.hidden_size, config.mlp_bias
        )
        self.down = RowParallelLinear(build, prefix + names.down, config.hidden_size, size, config.mlp_bias)
        self.activation = ActivationFunction(build, config.activation)
        self.inputs, self.size = len(names.inner), size

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        yield from self.inner.targets()
        yield from self.down.targets()

    def finish(self) -> None:
        """Pad the inner size of loaded weights with zeros if GEMMs would be slow.

        The activation of 0 is 0, so that the padding does not change outputs.
        """
        if self.size % GEMM_UNIT == 0:
            return
        extra = -self.size % PADDED_UNIT
        inner, down = self.inner.method, self.down.method
        if not isinstance(inner, UnquantizedLinear) or not isinstance(down, UnquantizedLinear):
            return
        inner.weight = F.pad(inner.weight.view(self.inputs, self.size, -1), (0, 0, 0, extra)).flatten(0, 1)
        if inner.bias is not None:
            inner.bias = F.pad(inner.bias.view(self.inputs, self.size), (0, extra)).flatten()
        down.weight = F.pad(down.weight, (0, extra))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output [tokens, hidden] for x [tokens, hidden]."""
        if self.inputs == 2:
            return self.down(self.activation.gate(self.inner(x)))
        return self.down(self.inner.apply_activation(x, self.activation))


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

    def __call__(
        self, x: torch.Tensor | None, residual: torch.Tensor, angles: Angles | None, attend: Attend
    ) -> torch.Tensor:
        """Compute the layer, whose input and output are sums of two tensors, which norms can add.

        Args:
            x: Output of the previous layer's feed-forward block [tokens, hidden]; None for the first layer.
            residual: Sum of all other outputs [tokens, hidden]. Its sum with x and the attention's output
                replaces it.
            angles: Angles of the tokens; None without rotary embedding.
            attend: Attention of the layer.

        Returns:
            Output of the layer's feed-forward block [tokens, hidden].
        """
        inputs = self.attention_norm(residual) if x is None else self.attention_norm.add(x, residual)
        attended = self.attention(inputs, angles, attend)
        return self.mlp(self.mlp_norm.add(attended, residual))
