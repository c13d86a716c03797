"""The decoder model: token embedding, decoder layers and output head.

The engine builds a `DecoderModel` on each rank, and calls `hidden` and `logits` in every step. Tensor names
are those of Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from mizzen.attention.base import StepAttention
from mizzen.layers.attention import ForwardContext
from mizzen.layers.context import BuildContext
from mizzen.layers.embedding import Head, TiedHead, TokenEmbedding
from mizzen.layers.linear_methods.small_batch import SmallBatchLinear, method_kernel_specs
from mizzen.layers.norm import RMSNorm
from mizzen.layers.rope import RotaryEmbedding
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.config import ModelConfig
from mizzen.models.decoder_layer import DecoderLayer

if TYPE_CHECKING:
    from mizzen.kernels.nvrtc import KernelSpec


class DecoderModel:
    """Decoder-only transformer that maps token ids to logits; holds the shard of one rank."""

    def __init__(self, build: BuildContext, config: ModelConfig) -> None:
        self.config = config
        self.collectives = build.collectives
        self.embedding = TokenEmbedding(build, "model.embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(build, config, layer) for layer in range(config.layers)]
        self.norm = RMSNorm(build, "model.norm", config.hidden_size, config.norm_epsilon)
        self.head = (
            TiedHead(build, self.embedding)
            if config.tie_embeddings
            else Head(build, "lm_head", config.vocab_size, config.hidden_size)
        )
        angle_dtype = torch.float32 if build.fused else build.dtype
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, angle_dtype, build.device)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of all checkpoint tensors."""
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
        """Run the layers over a batch of tokens.

        Args:
            tokens: Token ids, int64 [tokens].
            positions: Positions of the tokens in their sequences, int64 [tokens].
            attend: Attention of this batch.
            rows: Indices (int64, at least one) of the tokens whose hidden states are needed; None if all are.
                Other tokens are dropped as soon as the last layer has stored their keys and values.

        Returns:
            The residual stream [tokens or rows, hidden] in the model's dtype, not yet normalised.
        """
        cos, sin = self.rotary.angles(positions)
        context = ForwardContext(cos=cos, sin=sin, attend=attend)
        residual, x = self.embedding(tokens), None
        for layer in self.layers[:-1]:
            x, residual = layer(x, residual, context)
        x, residual = self.layers[-1](x, residual, context, rows)
        return residual if x is None else residual.add_(self.collectives.all_reduce(x))

    @contextmanager
    def without_fused_swiglu(self) -> Iterator[None]:
        """Disable the fused gate-up SwiGLU kernel of prefills in a `with` block that profiles peak memory.

        The profiled batch is the largest, and may use this kernel. A slightly smaller batch that does not use
        it may need more memory.
        """
        methods = [layer.mlp.gate_up.method for layer in self.layers]
        disabled = [
            method
            for method in methods
            if isinstance(method, SmallBatchLinear) and method.fuses_prefill_swiglu
        ]
        for method in disabled:
            method.fuses_prefill_swiglu = False
        try:
            yield
        finally:
            for method in disabled:
                method.fuses_prefill_swiglu = True

    def kernel_specs(self, batch_sizes: Collection[int]) -> set[KernelSpec]:
        """Return the specs of the GEMM kernels for these batch sizes; all layers use the same kernels."""
        layer = self.layers[0]
        specs = self.head.kernel_specs(batch_sizes)
        specs |= method_kernel_specs(layer.mlp.gate_up.method, batch_sizes, swiglu=True)
        for linear in (layer.attention.qkv_proj, layer.attention.o_proj, layer.mlp.down):
            specs |= method_kernel_specs(linear.method, batch_sizes)
        return specs

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits [rows, vocab] for hidden states [rows, hidden], in `out` if given."""
        return self.head(self.norm(hidden), out)
