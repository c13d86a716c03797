"""Self-attention of a decoder layer: projections, optional QK norm, RoPE and paged attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mizzen.attention.base import StepAttention
from mizzen.layers.context import BuildContext
from mizzen.layers.linear import QKVParallelLinear, RowParallelLinear
from mizzen.layers.norm import RMSNorm
from mizzen.layers.rope import rotate
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """Inputs that all layers of one forward pass share."""

    cos: torch.Tensor
    """Cosines of the RoPE angles at the tokens' positions, [tokens, 1, head_dim / 2]."""
    sin: torch.Tensor
    """Sines of the same angles, [tokens, 1, head_dim / 2]."""
    attend: StepAttention


class SelfAttention:
    """Self-attention of one layer, from the QKV projection to the output projection."""

    def __init__(self, build: BuildContext, config: ModelConfig, layer: int) -> None:
        self.layer = layer
        self.head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            build, config.hidden_size, config.heads, config.kv_heads, config.head_dim, config.qkv_bias
        )
        self.heads, self.kv_heads = self.qkv_proj.heads, self.qkv_proj.kv_heads
        width = config.heads * config.head_dim
        self.o_proj = RowParallelLinear(build, "o_proj", config.hidden_size, width, config.output_bias)
        self.fused = build.fused
        self.epsilon = config.norm_epsilon
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(build, "q_norm", config.head_dim, config.norm_epsilon)
            self.k_norm = RMSNorm(build, "k_norm", config.head_dim, config.norm_epsilon)

    def targets(self, prefix: str) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors under `prefix`."""
        yield from self.qkv_proj.targets(prefix)
        yield from self.o_proj.targets(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.targets(prefix)
            yield from self.k_norm.targets(prefix)

    def __call__(
        self,
        qkv: torch.Tensor,
        residual: torch.Tensor,
        context: ForwardContext,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Attend and apply the output projection; return the output and the residual stream.

        Args:
            qkv: QKV projection [tokens, (heads + 2 * kv_heads) * head_dim], with the heads of this rank.
            residual: Residual stream [tokens, hidden].
            context: Inputs that all layers share.
            rows: Indices of the tokens to continue with, int64; None for all.

        Returns:
            A pair of the output (None if the residual stream already contains it) and the residual stream,
            each [tokens or rows, hidden]. The output's sum over ranks must be added to the residual stream.
        """
        attended = self.attend(qkv, context).view(len(qkv), -1)
        if rows is not None:
            attended, residual = attended[rows], residual[rows]
        return self.o_proj.add_to_residual(residual, attended), residual

    def attend(self, qkv: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Store the keys and values of a QKV projection, and attend; return [tokens, heads, head_dim]."""
        if self.fused:
            if (fused_decode := context.attend.fused_decode) is not None:
                out = qkv.new_empty(len(qkv), self.heads, self.head_dim)
                fused_decode(self.layer, qkv, self.norms, self.epsilon, context.cos, context.sin, out)
                return out
            return context.attend.attend_cached(self.layer, self.prepare_qkv(qkv, context))
        heads = qkv.view(len(qkv), -1, self.head_dim)
        rotated, v = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rotated.split((self.heads, self.kv_heads), dim=1)
            rotated = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        q, k = rotate(rotated, context.cos, context.sin).split((self.heads, self.kv_heads), dim=1)
        return context.attend(self.layer, q, k, v)

    @property
    def norms(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Weights of the query norm and the key norm; None for a model without QK norm."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm.weight, self.k_norm.weight

    def prepare_qkv(self, qkv: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Apply QK norm and RoPE and store KV in one kernel; return the queries [tokens, heads, head_dim]."""
        from mizzen.kernels.attention.qk_norm_rope import qk_norm_rope

        attend = context.attend
        keys, values = attend.kv.keys[self.layer], attend.kv.values[self.layer]
        return qk_norm_rope(
            qkv, self.norms, self.epsilon, context.cos, context.sin, attend.slot_mapping, keys, values
        )
