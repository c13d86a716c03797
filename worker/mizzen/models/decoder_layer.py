"""The decoder layer of the Llama family, which Mistral, Qwen2 and Qwen3 share."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mizzen.layers.attention import ForwardContext, SelfAttention
from mizzen.layers.context import BuildContext
from mizzen.layers.mlp import SwiGLUMLP
from mizzen.layers.norm import RMSNorm
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.config import ModelConfig


class DecoderLayer:
    """Self-attention and a feed-forward block; each has a norm before it and adds to the residual stream."""

    def __init__(self, build: BuildContext, config: ModelConfig, layer: int) -> None:
        size, epsilon = config.hidden_size, config.norm_epsilon
        self.input_norm = RMSNorm(build, "input_layernorm", size, epsilon)
        self.attention = SelfAttention(build, config, layer)
        self.mlp_norm = RMSNorm(build, "post_attention_layernorm", size, epsilon)
        self.mlp = SwiGLUMLP(build, size, config.intermediate_size, config.mlp_bias)

    def targets(self, prefix: str) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors under `prefix`."""
        yield from self.input_norm.targets(prefix)
        yield from self.attention.targets(prefix + "self_attn.")
        yield from self.mlp_norm.targets(prefix)
        yield from self.mlp.targets(prefix + "mlp.")

    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        context: ForwardContext,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Add the previous layer's output to the residual stream, and apply this layer.

        Args:
            x: This rank's output [tokens, hidden] of the previous layer; its sum over ranks is added to the
                residual stream. None in the first layer, or if the stream already contains the sum.
            residual: Residual stream [tokens, hidden]; may be updated in place.
            context: Inputs that all layers share.
            rows: Indices of the tokens to continue with after the attention, int64; None for all.

        Returns:
            Two tensors [tokens or rows, hidden]. The first is this layer's output on this rank, to be passed
            on as the `x` of the next layer, or None if the residual stream already contains it. The second is
            the residual stream.
        """
        qkv, residual = self.attention.qkv_proj.apply_after_norm(self.input_norm, x, residual)
        x, residual = self.attention(qkv, residual, context, rows)
        return self.mlp(self.mlp_norm, x, residual)
