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
    """Attention and feed-forward block, each with a norm before it, around one residual stream."""

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
        """Return the term [tokens, hidden] that the residual stream lacks after this layer, and the stream.

        Terms are this rank's: their sums over ranks are added to the stream. A term is None if the stream is
        complete, as is `x`, the previous layer's term, in the first layer. `residual` may be updated in
        place. With `rows`, only those continue after the attention.
        """
        qkv, residual = self.attention.qkv_proj.apply_after_norm(self.input_norm, x, residual)
        x, residual = self.attention(qkv, residual, context, rows)
        return self.mlp(self.mlp_norm, x, residual)
