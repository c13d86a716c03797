"""The decoder that the served families share, built from layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mizzen.attention.base import StepAttention
from mizzen.layers.context import BuildContext, WeightTarget
from mizzen.layers.embedding import Embedding, Head, TiedHead
from mizzen.layers.linear import RowParallelLinear, MergedColumnParallelLinear, Rows, SmallBatchLinear, method_kernel_specs
from mizzen.layers.mlp import SwiGLUMLP
from mizzen.layers.norm import RMSNorm
from mizzen.layers.rope import RotaryEmbedding, rotate
from mizzen.models.config import ModelConfig

if TYPE_CHECKING:
    from mizzen.kernels.nvrtc import KernelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What the layers of one forward pass share."""

    cos: torch.Tensor
    sin: torch.Tensor
    """Angles of the tokens' positions, [tokens, 1, head_dim / 2]."""
    attend: StepAttention


class Attention:
    """QKVPrep, optional norms of queries and keys, rotation, and paged attention."""

    def __init__(self, build: BuildContext, config: ModelConfig, layer: int) -> None:
        self.layer = layer
        self.head_dim = config.head_dim
        tensor = build.mesh.tensor
        held = tensor.shard(config.heads, "num_attention_heads")
        shared = tensor.replicated_shard(config.kv_heads, "num_key_value_heads")
        self.heads, self.kv_heads = held.stop - held.start, shared.stop - shared.start
        width = config.heads * config.head_dim
        key_values = Rows.of(config.kv_heads, config.head_dim, shared)
        parts = {
            "q_proj": Rows.of(config.heads, config.head_dim, held),
            "k_proj": key_values,
            "v_proj": key_values,
        }
        self.qkv = MergedColumnParallelLinear(build, parts, config.hidden_size, config.qkv_bias)
        self.out = RowParallelLinear(build, "o_proj", config.hidden_size, width, config.output_bias)
        self.fused = build.fused
        self.epsilon = config.norm_epsilon
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(build, "q_norm", config.head_dim, config.norm_epsilon)
            self.k_norm = RMSNorm(build, "k_norm", config.head_dim, config.norm_epsilon)

    def targets(self, prefix: str) -> Iterator[WeightTarget]:
        """Yield where the checkpoint's tensors under `prefix` go."""
        yield from self.qkv.targets(prefix)
        yield from self.out.targets(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.targets(prefix)
            yield from self.k_norm.targets(prefix)

    def __call__(
        self,
        qkv: torch.Tensor,
        residual: torch.Tensor,
        forward: Forward,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Map the projection [tokens, (heads + 2 kv_heads) * d] to [tokens, hidden], or to `rows` alone.

        Returns this rank's term of the residual stream, None where the stream has it, and the stream.
        """
        attended = self.attend(qkv, forward).view(len(qkv), -1)
        if rows is not None:
            attended, residual = attended[rows], residual[rows]
        return self.out.add_to_residual(residual, attended), residual

    def attend(self, qkv: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Store the keys and values of a projection; return what its queries find [tokens, heads, d]."""
        if self.fused:
            if (projected := forward.attend.fused_decode) is not None:
                out = qkv.new_empty(len(qkv), self.heads, self.head_dim)
                projected(self.layer, qkv, self.norms, self.epsilon, forward.cos, forward.sin, out)
                return out
            return forward.attend.attend_cached(self.layer, self.prepare(qkv, forward))
        heads = qkv.view(len(qkv), -1, self.head_dim)
        rotated, v = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rotated.split((self.heads, self.kv_heads), dim=1)
            rotated = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        q, k = rotate(rotated, forward.cos, forward.sin).split((self.heads, self.kv_heads), dim=1)
        return forward.attend(self.layer, q, k, v)

    @property
    def norms(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The weights of the norms of queries and of keys."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm.weight, self.k_norm.weight

    def prepare(self, qkv: torch.Tensor, forward: Forward) -> torch.Tensor:
        """Norm, rotate and store in one kernel; return the queries [tokens, heads, head_dim]."""
        from mizzen.kernels.attention.qk_norm_rope import qk_norm_rope

        attend, norms = forward.attend, self.norms
        keys, values = attend.kv.keys[self.layer], attend.kv.values[self.layer]
        return qk_norm_rope(qkv, norms, self.epsilon, forward.cos, forward.sin, attend.slot_mapping, keys, values)


class DecoderLayer:
    """Attention and feed-forward, each behind a norm, with a residual stream around both."""

    def __init__(self, build: BuildContext, config: ModelConfig, layer: int) -> None:
        size, epsilon = config.hidden_size, config.norm_epsilon
        self.input_norm = RMSNorm(build, "input_layernorm", size, epsilon)
        self.attention = Attention(build, config, layer)
        self.mlp_norm = RMSNorm(build, "post_attention_layernorm", size, epsilon)
        self.mlp = SwiGLUMLP(build, size, config.intermediate_size, config.mlp_bias)

    def targets(self, prefix: str) -> Iterator[WeightTarget]:
        """Yield where the checkpoint's tensors under `prefix` go."""
        yield from self.input_norm.targets(prefix)
        yield from self.attention.targets(prefix + "self_attn.")
        yield from self.mlp_norm.targets(prefix)
        yield from self.mlp.targets(prefix + "mlp.")

    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        forward: Forward,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the term [tokens, hidden] that the residual stream lacks behind this layer, and the stream.

        Terms are this rank's: the stream gets their sums over ranks. A term is None where the stream lacks
        none, as `x`, that of the layer before, is at the first; `residual` may be updated in place. With
        `rows`, only those are carried on behind the attention.
        """
        qkv, residual = self.attention.qkv.after(self.input_norm, x, residual)
        x, residual = self.attention(qkv, residual, forward, rows)
        return self.mlp(self.mlp_norm, x, residual)


class Decoder:
    """Token ids in, logits out; weights as in the checkpoints of Hugging Face."""

    def __init__(self, build: BuildContext, config: ModelConfig) -> None:
        self.config = config
        self.collectives = build.collectives
        self.embedding = Embedding(build, "model.embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(build, config, layer) for layer in range(config.layers)]
        self.norm = RMSNorm(build, "model.norm", config.hidden_size, config.norm_epsilon)
        self.head = (
            TiedHead(build, self.embedding)
            if config.tie_embeddings
            else Head(build, "lm_head", config.vocab_size, config.hidden_size)
        )
        angles = torch.float32 if build.fused else build.dtype
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, angles, build.device)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield where the checkpoint's tensors go."""
        yield from self.embedding.targets("")
        for index, layer in enumerate(self.layers):
            yield from layer.targets(f"model.layers.{index}.")
        yield from self.norm.targets("")
        yield from self.head.targets()

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: StepAttention,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the layers over a batch of tokens [tokens] at `positions` [tokens], both int64.

        Args:
            tokens: Ids.
            positions: Where they stand in their sequences.
            attend: The attention of this batch.
            rows: The tokens whose hidden states are wanted, int64 and at least one; None wants all. The
                others end with their keys and values in the last layer.

        Returns:
            The residual stream [tokens or rows, hidden], not yet normalised.
        """
        cos, sin = self.rotary.angles(positions)
        forward = Forward(cos=cos, sin=sin, attend=attend)
        residual, x = self.embedding(tokens), None
        for layer in self.layers[:-1]:
            x, residual = layer(x, residual, forward)
        x, residual = self.layers[-1](x, residual, forward, rows)
        return residual if x is None else residual.add_(self.collectives.all_reduce(x))

    @contextmanager
    def without_fused_swiglu(self) -> Iterator[None]:
        """Let no product of prompts use gates at once, as long as it is measured how much memory steps take.

        The largest step may use them so, and one of nearly as many tokens not.
        """
        methods = [layer.mlp.gate_up.method for layer in self.layers]
        changed = [one for one in methods if isinstance(one, SmallBatchLinear) and one.gates_prompts]
        for method in changed:
            method.gates_prompts = False
        try:
            yield
        finally:
            for method in changed:
                method.gates_prompts = True

    def kernel_specs(self, counts: Collection[int]) -> set[KernelSpec]:
        """Return what products for batches of so many rows are compiled from; all layers share them."""
        layer = self.layers[0]
        found = self.head.kernels(counts) | method_kernel_specs(layer.mlp.gate_up.method, counts, gate=True)
        for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.down):
            found |= method_kernel_specs(linear.method, counts)
        return found

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits [rows, vocab] of rows of `hidden`, in `out` where it is given."""
        return self.head(self.norm(hidden), out)
