# SPDX-License-Identifier: Apache-2.0
"""Self-attention of a decoder layer: projections, optional QK norm, RoPE and paged attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mizzen.attention.base import StepAttention
from mizzen.layers.context import BuildContext
from mizzen.layers.linear import MergedColumnParallelLinear, RowParallelLinear, name_rows
from mizzen.layers.qk_norm import QKNormLayer
from mizzen.layers.rope import half_split_order, rotate
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """Inputs that all layers of one forward pass share."""

    angles: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Cosines and sines [tokens, 1, head_dim / 2] of the tokens' positions, for each rotary embedding."""
    attend: StepAttention
    query_factors: torch.Tensor | None = None
    """Factors of the queries [tokens, 1, 1], which depend on the positions; None if all are 1."""


class SelfAttention:
    """Self-attention of one layer, from the QKV projection to the input of the output projection."""

    def __init__(self, build: BuildContext, config: ModelConfig, layer: int, prefix: str) -> None:
        block, names, head_dim = config.block, config.block.names, config.head_dim
        self.layer = layer
        self.head_dim = head_dim
        self.rope_index = config.rope_index(layer)
        tensor = build.mesh.tensor
        q_shard = tensor.shard(config.heads, "num_attention_heads")
        kv_shard = tensor.replicated_shard(config.kv_heads, "num_key_value_heads")
        self.heads, self.kv_heads = q_shard.stop - q_shard.start, kv_shard.stop - kv_shard.start
        self.qkv_proj = MergedColumnParallelLinear(
            build,
            name_rows(
                [prefix + name for name in names.query_key_value],
                [count * head_dim for count in (config.heads, config.kv_heads, config.kv_heads)],
                [
                    slice(shard.start * head_dim, shard.stop * head_dim)
                    for shard in (q_shard, kv_shard, kv_shard)
                ],
            ),
            config.hidden_size,
            config.qkv_bias,
        )
        self.o_proj = RowParallelLinear(
            build, prefix + names.output, config.hidden_size, config.heads * head_dim, config.output_bias
        )
        self.order = half_split_order(config.ropes[self.rope_index], head_dim)
        """Order of the elements of query and key heads in memory; None for the checkpoint's order."""
        self.qk_norm = (
            None if block.qk_norm is None else QKNormLayer(build, config, prefix, q_shard, kv_shard)
        )
        self.q_shard = q_shard
        self.sinks = build.allocate(self.heads) if block.attention_sinks else None
        """Scores of this rank's attention sinks [heads]; None for a model without."""
        self.sinks_name, self.all_heads = prefix + names.sinks, config.heads
        self.norm_after_rope = block.qk_norm_after_rope
        self.fused = build.fused and (
            self.qk_norm is None or (self.qk_norm.fusible and not self.norm_after_rope)
        )
        """Whether QK norm, RoPE and the KV write may use the fused kernels."""
        self.epsilon = config.norm_epsilon

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        yield from self.qkv_proj.targets()
        yield from self.o_proj.targets()
        if self.qk_norm is not None:
            yield from self.qk_norm.targets()
        if self.sinks is not None:
            yield WeightTarget(
                name=self.sinks_name, shape=(self.all_heads,), shard=(self.q_shard,), destination=self.sinks
            )

    def finish(self) -> None:
        """Prepare the loaded weights: reorder the elements of query and key heads, if RoPE needs it."""
        if self.order is not None:
            device = self.o_proj.empty.device
            rotated = (self.heads + self.kv_heads) * self.head_dim
            starts = torch.arange(0, rotated, self.head_dim)[:, None]
            values = torch.arange(rotated, rotated + self.kv_heads * self.head_dim)
            rows = torch.cat(((starts + self.order).flatten(), values))
            self.qkv_proj.method.permute_rows(rows.to(device))
            if self.qk_norm is not None:
                self.qk_norm.permute(self.order.to(device))
        if self.qk_norm is not None:
            self.qk_norm.finish()
        self.qkv_proj.method.finish()
        self.o_proj.method.finish()

    def scale_kv(self, keys: float, values: float) -> None:
        """Divide the keys and values by scales, which are powers of two, without changing the result.

        Queries are multiplied by the scale of the keys, and the output projection by that of the values.
        """
        first_key, first_value = (heads * self.head_dim for heads in (self.heads, self.heads + self.kv_heads))
        qkv, output = self.qkv_proj.method, self.o_proj.method
        if self.qk_norm is None:
            qkv.scale_rows(slice(0, first_key), keys)
            qkv.scale_rows(slice(first_key, first_value), 1 / keys)
        else:  # the norm cancels factors of the projection
            self.qk_norm.scale(keys, 1 / keys)
        qkv.scale_rows(slice(first_value, None), 1 / values)
        output.absorb_input_factor(values)

    def __call__(
        self,
        qkv: torch.Tensor,
        residual: torch.Tensor,
        context: ForwardContext,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend; return the input of the output projection and the residual stream.

        Args:
            qkv: QKV projection [tokens, (heads + 2 * kv_heads) * head_dim], with the heads of this rank.
            residual: Residual stream [tokens, hidden].
            context: Inputs that all layers share.
            rows: Indices of the tokens to continue with, int64; None for all.

        Returns:
            The attention's result [tokens or rows, heads * head_dim] and the residual stream
            [tokens or rows, hidden].
        """
        attended = self.attend(qkv, context).view(len(qkv), -1)
        if rows is not None:
            attended, residual = attended[rows], residual[rows]
        return attended, residual

    def attend(self, qkv: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Store the keys and values of a QKV projection, and attend; return [tokens, heads, head_dim]."""
        cos, sin = context.angles[self.rope_index]
        if self.fused:
            if self.qk_norm is not None:
                self.qk_norm.apply_full_width(qkv)
            if (fused_decode := context.attend.fused_decode) is not None and context.query_factors is None:
                out = qkv.new_empty(len(qkv), self.heads, self.head_dim)
                fused_decode(self.layer, qkv, self.norms, self.epsilon, cos, sin, out)
                return out
            q, k, v = self.prepare_qkv(qkv, cos, sin, context.attend)
            if context.query_factors is not None:
                q.mul_(context.query_factors)
            return context.attend.attend_cached(self.layer, q, k, v)
        heads = qkv.view(len(qkv), -1, self.head_dim)
        rotated, v = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if self.qk_norm is not None and not self.norm_after_rope:
            rotated = self.qk_norm(rotated)
        rotated = rotate(rotated, cos, sin)
        if self.qk_norm is not None and self.norm_after_rope:
            rotated = self.qk_norm(rotated)
        q, k = rotated.split((self.heads, self.kv_heads), dim=1)
        if context.query_factors is not None:
            q = q * context.query_factors
        return context.attend(self.layer, q, k, v)

    @property
    def norms(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Weights of the norms of each query head and key head; None if heads are not normalised singly."""
        return None if self.qk_norm is None else self.qk_norm.head_weights

    def prepare_qkv(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: StepAttention
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Apply QK norm and RoPE and store KV in one kernel.

        Returns:
            Queries [tokens, heads, head_dim], and the keys and values [tokens, kv_heads, head_dim] for the
            attention; None if it reads those in the cache.
        """
        from mizzen.kernels.attention.qk_norm_rope import qk_norm_rope

        keys, values, keeps = attend.kv.keys[self.layer], attend.kv.values[self.layer], attend.reads_batch_kv
        q = qk_norm_rope(
            qkv, self.norms, self.epsilon, cos, sin, attend.slot_mapping, keys, values, keep_keys=keeps
        )
        if not keeps:
            return q, None, None
        k, v = qkv.view(len(qkv), -1, self.head_dim)[:, self.heads :].split(self.kv_heads, dim=1)
        return q, k, v
