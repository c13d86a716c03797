# SPDX-License-Identifier: Apache-2.0
"""Norm of queries and keys, of each head by itself or of all heads of a token together."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mizzen.layers.context import BuildContext
from mizzen.layers.norm import LayerNorm, RMSNorm
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.block import NormKind, QKNorm
from mizzen.models.config import ModelConfig


class QKNormLayer:
    """Norm of the queries and keys of one layer, on one rank.

    With the scope `FULL` and several ranks, the mean square is that of the heads of all ranks.
    """

    def __init__(
        self, build: BuildContext, config: ModelConfig, prefix: str, q_shard: slice, kv_shard: slice
    ) -> None:
        block, size, epsilon = config.block, config.head_dim, config.norm_epsilon
        self.scope = block.qk_norm
        self.collectives = build.collectives
        self.fused = build.fused
        self.head_dim = size
        self.heads = q_shard.stop - q_shard.start
        self.shards = (q_shard, kv_shard)
        self.totals = (config.heads, config.kv_heads)
        self.norms: list[RMSNorm | LayerNorm] = []
        plus_one = block.qk_norm_kind is NormKind.RMS_PLUS_ONE
        for name, shard in zip(block.names.query_key_norm, self.shards, strict=True):
            count = shard.stop - shard.start
            if self.scope is QKNorm.HEADWISE:
                self.norms.append(LayerNorm(build, prefix + name, (count, size), epsilon))
            else:
                width = size if self.scope is QKNorm.HEAD else count * size
                self.norms.append(RMSNorm(build, prefix + name, width, epsilon, plus_one=plus_one))
        kv_count = kv_shard.stop - kv_shard.start
        self.copies = build.collectives.size * kv_count // config.kv_heads
        """Number of ranks that hold the same KV head."""

    @property
    def fusible(self) -> bool:
        """Whether the norm can be applied by, or ahead of, the fused kernel of QK norm and RoPE."""
        return self.scope in (QKNorm.HEAD, QKNorm.FULL)

    @property
    def head_weights(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Weights [head_dim] of the norms of a query head and a key head; None for another scope."""
        return (self.norms[0].weight, self.norms[1].weight) if self.scope is QKNorm.HEAD else None

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the weights."""
        for norm, shard, total in zip(self.norms, self.shards, self.totals, strict=True):
            if self.scope is QKNorm.HEAD:
                yield from norm.targets()
            else:
                unit = 1 if self.scope is QKNorm.HEADWISE else self.head_dim
                rows = slice(shard.start * unit, shard.stop * unit)
                yield from norm.targets_of_rows(rows, total * unit)

    def permute(self, order: torch.Tensor) -> None:
        """Reorder the elements of every head: element i becomes element order[i] (int64 [head_dim])."""
        for norm in self.norms:
            heads = norm.weight.view(-1, self.head_dim)
            heads.copy_(heads[:, order])

    def finish(self) -> None:
        """Prepare the loaded weights."""
        for norm in self.norms:
            norm.finish()

    def scale(self, queries: float, keys: float) -> None:
        """Multiply the queries and keys after the norm by factors, which are powers of two."""
        for norm, factor in zip(self.norms, (queries, keys), strict=True):
            norm.weight.mul_(factor)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return queries and keys x [tokens, heads + kv_heads, head_dim], normalised, as a new tensor."""
        if self.scope is QKNorm.FULL:
            out = x.reshape(len(x), -1).clone()
            self.normalise_full_width(out)
            return out.view(x.shape)
        q, k = x.split((self.heads, x.shape[1] - self.heads), dim=1)
        return torch.cat((self.norms[0](q), self.norms[1](k)), dim=1)

    def apply_full_width(self, qkv: torch.Tensor) -> None:
        """With the scope `FULL`, normalise the queries and keys of a QKV projection in place.

        `qkv` is [tokens, (heads + 2 * kv_heads) * head_dim].
        """
        if self.scope is QKNorm.FULL:
            self.normalise_full_width(qkv)

    def normalise_full_width(self, x: torch.Tensor) -> None:
        """Normalise in place the queries and keys, with which each row of x [tokens, width] begins."""
        q_width, k_width = (len(norm.weight) for norm in self.norms)
        q, k = x[:, :q_width], x[:, q_width : q_width + k_width]
        if self.collectives.size == 1:
            for norm, part in zip(self.norms, (q, k), strict=True):
                if self.fused:
                    from mizzen.kernels.norm import rms_norm

                    rms_norm(part, norm.weight, norm.epsilon, out=part)
                else:
                    part.copy_(norm(part))
            return
        squares = torch.stack([part.float().square().sum(-1) for part in (q, k)])
        squares[1] /= self.copies
        means = self.collectives.all_reduce(squares)
        for norm, part, total, mean in zip(self.norms, (q, k), self.totals, means, strict=True):
            scale = torch.rsqrt(mean / (total * self.head_dim) + norm.epsilon)[:, None]
            part.copy_((part.float() * scale).to(x.dtype) * norm.weight)
