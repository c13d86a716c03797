# SPDX-License-Identifier: Apache-2.0
"""The decoder model: token embedding, decoder layers and output head.

The engine builds a `DecoderModel` on each rank, and calls `hidden` and `logits` in every step. Tensor names
are those of Hugging Face checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from mizzen.attention.base import StepAttention
from mizzen.layers.attention import ForwardContext
from mizzen.layers.context import BuildContext
from mizzen.layers.embedding import Head, TiedHead, TokenEmbedding
from mizzen.layers.experts.load import ExpertLoad
from mizzen.layers.experts.sparse_mlp import Mixture, SparseMLP
from mizzen.layers.linear_methods.base import without_prefill_fusion
from mizzen.layers.norm import make_norm
from mizzen.layers.rope import RotaryEmbedding
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.config import ModelConfig
from mizzen.models.decoder_layer import make_layer
from mizzen.models.image_rows import BatchImages
from mizzen.models.pooling.output import PooledOutput

if TYPE_CHECKING:
    from mizzen.kernels.nvrtc import KernelSpec


class DecoderModel:
    """Decoder-only transformer that maps token ids to logits; holds the shard of one rank."""

    def __init__(self, build: BuildContext, config: ModelConfig) -> None:
        self.config = config
        self.ignored: Sequence[re.Pattern[str]] = [re.compile(name) for name in config.ignored_tensors]
        """Patterns of the names of checkpoint tensors that the model does not need."""
        self.collectives = build.collectives
        block, hidden = config.block, config.hidden_size
        names = block.names
        self.embedding = TokenEmbedding(build, names.prefix + names.embedding, config.vocab_size, hidden)
        self.layers = [make_layer(build, config, layer) for layer in range(config.layers)]
        self.mixtures = {
            index: layer.mlp.down
            for index, layer in enumerate(self.layers)
            if isinstance(layer.mlp, SparseMLP)
        }
        """Layers with experts, by their index."""
        self.expert_load = make_expert_load(build, config, self.mixtures)
        self.norm = make_norm(
            build,
            names.prefix + names.final_norm,
            hidden,
            config.norm_epsilon,
            block.norm,
            bias=block.norm_bias,
        )
        self.head = (
            TiedHead(build, self.embedding)
            if config.tie_embeddings
            else Head(build, names.head, config.vocab_size, hidden, bias=config.head_bias)
        )
        self.pooled = PooledOutput(build.device, len(config.labels), hidden)
        angle_dtype = torch.float32 if build.fused else build.dtype
        self.rotaries = [
            RotaryEmbedding(rope, config.head_dim, angle_dtype, build.device) for rope in config.ropes
        ]
        self.embedding_multiplier = config.embedding_multiplier
        if config.rounds_embedding_multiplier:
            self.embedding_multiplier = torch.tensor(config.embedding_multiplier, dtype=build.dtype).item()

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of all checkpoint tensors."""
        yield from self.embedding.targets()
        for layer in self.layers:
            yield from layer.targets()
        yield from self.norm.targets()
        yield from self.head.targets()
        yield from self.pooled.targets()

    def finish(self) -> None:
        """Prepare the loaded weights for the kernels; must be called once, before the first step."""
        for layer in self.layers:
            layer.finish()
        self.norm.finish()
        self.head.finish()

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: StepAttention,
        rows: torch.Tensor | None = None,
        *,
        rotary: torch.Tensor | None = None,
        images: BatchImages | None = None,
    ) -> torch.Tensor:
        """Run the layers over a batch of tokens.

        Args:
            tokens: Token ids, int64 [tokens].
            positions: Positions of the tokens in their sequences, int64 [tokens].
            attend: Attention of this batch.
            rows: Indices (int64, at least one) of the tokens whose hidden states are needed; None if all are.
                Other tokens are dropped as soon as the last layer has stored their keys and values. -1 is
                padding of a graph, whose result may be anything.
            rotary: Rotary positions of the tokens, int64 [tokens], or [3, tokens] for time, height and width;
                None if they are `positions`.
            images: Embeddings of images, which replace those of tokens after the embedding multiplier; None
                for none. They have fewer parts than the model has layers.

        Returns:
            The residual stream [tokens or rows, hidden] in the model's dtype, not yet normalised.
        """
        context = ForwardContext(
            angles=tuple(each.angles(positions if rotary is None else rotary) for each in self.rotaries),
            attend=attend,
            query_factors=self.query_factors(positions),
        )
        residual = self.embedding(tokens)
        if self.embedding_multiplier != 1:
            residual.mul_(self.embedding_multiplier)
        if images is not None:
            images.replace_tokens(residual)
        self.mark_live(attend.live, rows)
        x, residual = self.run_first_layers(residual, context, images)
        last = self.layers[-1]
        x, residual = last(x, residual, context, rows)
        if self.expert_load is not None:
            self.expert_load.add_step(narrowed=rows is not None)
        self.mark_live(None, None)  # the memory is needed again
        if x is None:
            return residual
        return residual.add_(self.collectives.all_reduce(x) if last.partial_output else x)

    def mark_live(self, live: torch.Tensor | None, rows: torch.Tensor | None) -> None:
        """Tell layers with experts which of their inputs are not padding.

        Args:
            live: Tokens that are not padding, bool [tokens]; None if all are.
            rows: Indices of the tokens with which the last layer continues; see `hidden`.
        """
        for mixture in self.mixtures.values():
            mixture.live = live
        last = self.mixtures.get(len(self.layers) - 1)
        if last is not None and live is not None and rows is not None:
            last.live = rows >= 0

    def run_first_layers(
        self, residual: torch.Tensor, context: ForwardContext, images: BatchImages | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Run all layers but the last; return the output and the residual stream, as layers do."""
        x = None
        layers = self.layers[:-1]
        if images is not None:
            count = images.layers(self.config.hidden_size)
            for index, layer in enumerate(layers[:count]):
                x, residual = layer(x, residual, context)
                # x is added to the residual stream later, and the order of additions does not matter.
                images.add_part(residual, index)
            layers = layers[count:]
        for layer in layers:
            x, residual = layer(x, residual, context)
        return x, residual

    def query_factors(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Return factors [tokens, 1, 1] of queries at `positions` (int64 [tokens]); None if all are 1."""
        if self.config.block.query_scaling is None:
            return None
        weight, period = self.config.block.query_scaling
        factors = 1 + weight * torch.log1p(torch.floor(positions / period))
        return factors.to(self.embedding.weight.dtype)[:, None, None]

    def attention_sinks(self) -> torch.Tensor | None:
        """Return the attention sinks of this rank [layers, heads]; None for a model without."""
        sinks = [layer.attention.sinks for layer in self.layers if layer.attention.sinks is not None]
        return torch.stack(sinks) if sinks else None

    def without_fused_swiglu(self) -> AbstractContextManager[None]:
        """Disable the fused gate-up SwiGLU kernel of prefills in a `with` block that profiles peak memory.

        The profiled batch is the largest, and may use this kernel. A slightly smaller batch that does not use
        it may need more memory.
        """
        return without_prefill_fusion(
            [method for layer in self.layers for method in layer.mlp.gate_up_methods()]
        )

    def kernel_specs(self, batch_sizes: Collection[int]) -> set[KernelSpec]:
        """Return the specs of the GEMM kernels for these batch sizes.

        All unquantized layers use the same kernels, except that dense feed-forward blocks and experts differ.
        Quantized layers may have different formats.
        """
        specs = self.head.kernel_specs(batch_sizes)
        layers = self.layers if self.config.quantization.schemes else self.layers[:1]
        for attention in (layer.attention for layer in layers):
            for linear in (attention.qkv_proj, attention.o_proj):
                specs |= linear.method.kernel_specs(batch_sizes)
        blocks = [layer.mlp for layer in layers] + [
            *{type(layer.mlp): layer.mlp for layer in self.layers}.values()
        ]
        for mlp in blocks:
            specs |= mlp.kernel_specs(batch_sizes)
        return specs

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits [rows, vocab] for hidden states [rows, hidden], in `out` if given."""
        logits = self.head(self.norm(hidden), out)
        if self.config.logits_multiplier != 1:
            logits.mul_(self.config.logits_multiplier)
        if (cap := self.config.logits_softcap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits


def make_expert_load(
    build: BuildContext, config: ModelConfig, mixtures: Mapping[int, Mixture]
) -> ExpertLoad | None:
    """Make the counts of the tokens of each expert; None if no layer has experts, or others count them."""
    if config.experts is None or not build.counts_experts or not mixtures:
        return None
    return ExpertLoad(
        [*mixtures.values()],
        (*mixtures,),
        config.experts.count,
        build.device,
        last_layer_narrows=config.layers - 1 in mixtures,
    )
