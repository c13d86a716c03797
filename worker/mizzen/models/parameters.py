# SPDX-License-Identifier: Apache-2.0
"""Counts a model's parameters from its configuration. Importing this module does not import torch."""

from __future__ import annotations

from mizzen.layers.sharding import Axis, choose_expert_groups
from mizzen.models.block import Activation, BlockConfig, NormPlacement, QKNorm
from mizzen.models.config import ModelConfig
from mizzen.models.encoders.parameters import count_encoder_parameters
from mizzen.models.vision.parameters import count_vision_parameters

NORMS_PER_LAYER = {
    NormPlacement.PRE: 2,
    NormPlacement.POST: 2,
    NormPlacement.SANDWICH: 4,
    NormPlacement.PARALLEL: 1,
}
XIELU_PARAMETERS = 4


def count_parameters(config: ModelConfig, ranks: int = 1, *, active: bool = False) -> int:
    """Return the number of parameters that rank 0 of `ranks` ranks holds; with one rank, all of the model.

    The sizes of the model must be divisible as `check_shardable` requires. Rank 0 holds the whole vision
    encoder. With `active`, only the experts of one token are counted instead of all experts, and no vision
    encoder.
    """
    if config.encoder is not None:
        return count_encoder_parameters(config, config.encoder)
    hidden, block = config.hidden_size, config.block
    heads, kv_heads = config.heads // ranks, max(1, config.kv_heads // ranks)
    query, key_value = heads * config.head_dim, kv_heads * config.head_dim
    qkv = query + 2 * key_value
    attention = (hidden + config.qkv_bias) * qkv + hidden * (query + config.output_bias)
    attention += heads * block.attention_sinks
    norm = hidden * (1 + block.norm_bias)
    layer = attention + norm * NORMS_PER_LAYER[block.placement]
    layer += count_qk_norm(block, config.head_dim, query + key_value)
    rows, _ = Axis(0, ranks).vocabulary_shard(config.vocab_size)
    tables = rows * (hidden if config.tie_embeddings else 2 * hidden + config.head_bias)
    blocks = count_feed_forward(config, ranks, active=active)
    vision = count_vision_parameters(config.vision) if config.vision is not None and not active else 0
    return config.layers * layer + blocks + norm + tables + vision


def count_feed_forward(config: ModelConfig, ranks: int, *, active: bool) -> int:
    """Return the number of parameters of the feed-forward blocks of all layers on one of `ranks` ranks."""
    experts, dense = config.experts, count_mlp(config, config.intermediate_size // ranks)
    if experts is None:
        return config.layers * dense
    routed = experts.per_token if active else experts.count
    mixture = 3 * config.hidden_size * (routed * experts.width // ranks)
    mixture += experts.count * (config.hidden_size + experts.correction_bias + experts.router_bias)
    if experts.biases:
        groups = choose_expert_groups(config, ranks)
        mixture += 2 * (routed * experts.width // ranks) + routed // groups * config.hidden_size
    if experts.shared_width:
        mixture += count_mlp(config, experts.shared_width // ranks)
        mixture += config.hidden_size * experts.shared_gate
    sparse = sum(experts.layers)
    return sparse * mixture + (config.layers - sparse) * dense


def count_mlp(config: ModelConfig, inner: int) -> int:
    """Return the number of parameters of a dense feed-forward block with `inner` inner elements."""
    hidden, inputs = config.hidden_size, len(config.block.names.gate_up)
    mlp = inputs * inner * (hidden + config.mlp_bias) + hidden * (inner + config.mlp_bias)
    return mlp + XIELU_PARAMETERS * (config.block.activation is Activation.XIELU)


def count_qk_norm(block: BlockConfig, head_dim: int, width: int) -> int:
    """Return the number of parameters of the norms of a layer's queries and keys, with `width` elements."""
    if block.qk_norm is None:
        return 0
    return 2 * head_dim if block.qk_norm is QKNorm.HEAD else width
