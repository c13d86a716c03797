# SPDX-License-Identifier: Apache-2.0
"""Memory that the KV cache and the largest step need, estimated from the shape of a model.

Importing this module does not import torch: `mizzen inspect` uses it too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mizzen.engine.config import EngineOptions
from mizzen.engine.graph_sizes import max_graph_rows, max_graph_tokens
from mizzen.models.config import ModelConfig
from mizzen.quantization.schemes import Mxfp4Weights

DEQUANTIZED_BYTES = 256 << 20
"""Largest size of the temporary matrices into which kernels dequantize weights for large batches."""
MAX_DIRECT_ROWS = 256
"""Largest number of rows for which kernels multiply by quantized weights without such a matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes that KV and the largest step need on one rank."""

    token_bytes: int
    """Bytes of one token's KV in all layers."""
    step_bytes: int
    """Bytes of the largest step's activations, and of per-slot state."""
    graph_bytes: int = 0
    """Bytes of activations that captured graphs hold exclusively."""

    @classmethod
    def estimate(
        cls, config: ModelConfig, options: EngineOptions, element: int, kv_element: int | None = None
    ) -> MemoryNeed:
        """Estimate the need of a rank from the shape of the model.

        Activations peak in the MLP, where the residual stream, the MLP's input, the gate and up projections
        and their product exist at once, in a mixture of experts for all experts of a token. A native mixture
        also copies the input for each expert of a token, holds the expert's output beside it, and sums the
        outputs in float32. Top-p sampling
        without a kernel sorts a row's logits with their indices and sums them in float64, which takes about
        ten times the size of the row in float32. Penalties need a count per slot and vocabulary token. With
        several ranks, the logits gathered from all ranks are added, and for quantized weights temporary
        matrices, which graphs of large batches have in their own memory. All graphs have one for the experts
        in MXFP4.

        Args:
            config: Shape of the model.
            options: Engine options.
            element: Bytes per element of weights and activations.
            kv_element: Bytes per element of the KV cache; `element` by default.
        """
        ranks = options.tensor
        sharing = 1 if config.replicates_attention else ranks
        kv_heads = max(1, config.kv_heads // sharing)
        width = 3 * config.hidden_size + 4 * config.active_width // ranks
        if config.experts is not None:
            width += (2 * config.experts.per_token + 4) * config.hidden_size
        heads = (3 * config.heads // sharing + 2 * kv_heads) * config.head_dim
        tokens = options.prefill_chunk_tokens + options.max_running_requests
        dequantized = DEQUANTIZED_BYTES if config.quantization.schemes else 0
        restored = count_restored(config, ranks)
        logits = options.max_running_requests * config.vocab_size * (44 + element * (ranks > 1))
        rows, captured = max_graph_rows(options), max_graph_tokens(options)
        return cls(
            token_bytes=2 * config.layers * kv_heads * config.head_dim * (kv_element or element),
            step_bytes=tokens * (width + heads) * element + logits + dequantized + restored,
            graph_bytes=captured * (width + heads) * element
            + rows * config.vocab_size * (element + 4)
            + (dequantized if captured > MAX_DIRECT_ROWS else 0)
            + (restored if rows else 0),
        )

    @classmethod
    def estimate_encoder(cls, config: ModelConfig, options: EngineOptions, element: int) -> MemoryNeed:
        """Estimate the need of an encoder, which keeps no KV.

        Activations peak in the feed-forward block (inputs, residual, inner projections and their activation)
        or in the attention (queries, keys and values, rotated copies, and the output). Pooling converts the
        hidden states to float32.

        Args:
            config: Configuration of the encoder.
            options: Engine options.
            element: Bytes per element of weights and activations.
        """
        tokens = encoder_step_tokens(config, options)
        inner = 2 if config.encoder is not None and config.encoder.has_gate else 1
        mlp = 3 * config.hidden_size + (inner + 1) * config.intermediate_size
        attention = 2 * config.hidden_size + 7 * config.heads * config.head_dim
        captured = encoder_graph_tokens(config, options)
        return cls(
            token_bytes=0,
            step_bytes=tokens * (max(mlp, attention) * element + 4 * config.hidden_size),
            graph_bytes=captured * (max(mlp, attention) + config.hidden_size) * element,
        )

    def with_measured_step(self, measured_bytes: int) -> MemoryNeed:
        """Return this need with `step_bytes` replaced by the measured bytes plus the bytes of graphs."""
        return replace(self, step_bytes=measured_bytes + self.graph_bytes)


def encoder_step_tokens(config: ModelConfig, options: EngineOptions) -> int:
    """Return the number of tokens of an encoder's largest step, which has room for the longest prompt."""
    return max(options.prefill_chunk_tokens, options.context_length or config.context_length)


def encoder_graph_tokens(config: ModelConfig, options: EngineOptions) -> int:
    """Return the maximum number of tokens of an encoder's captured step; 0 without graphs."""
    if options.device != "cuda" or options.cuda_graph == "off":
        return 0
    step_tokens, most = encoder_step_tokens(config, options), options.cuda_graph_max_tokens
    return step_tokens if most is None else min(most, step_tokens)


def count_restored(config: ModelConfig, ranks: int) -> int:
    """Return the bytes of the gate and up projections of a layer's experts in bfloat16, if they are MXFP4."""
    experts = config.experts
    if experts is None or not any(isinstance(each, Mxfp4Weights) for each in config.quantization.schemes):
        return 0
    return 2 * experts.count * (2 * experts.width // ranks) * config.hidden_size
