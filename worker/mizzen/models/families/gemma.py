# SPDX-License-Identifier: Apache-2.0
"""Gemma 2 (arXiv 2408.00118) and Gemma 3 (arXiv 2503.19786), whose norms surround each block."""

from __future__ import annotations

import math
from dataclasses import replace

from mizzen.models.block import BlockConfig, NormKind, NormPlacement, QKNorm, TensorNames
from mizzen.models.config import ModelConfig, mark_layers, read_decoder_config, read_heads, set_layer_types
from mizzen.models.hf_fields import Fields
from mizzen.models.rope_config import RopeConfig, read_rope, read_ropes_by_layer_type

GEMMA2, GEMMA3 = "Gemma2ForCausalLM", "Gemma3ForCausalLM"
NAMES = TensorNames(mlp_norm="pre_feedforward_layernorm")
LOCAL_THETA, GLOBAL_THETA = 10_000.0, 1_000_000.0


def parse_gemma2(fields: Fields) -> ModelConfig:
    """Read the config.json of a Gemma 2 model; every second layer has full attention."""
    fields = set_layer_types(
        Fields({"head_dim": 256, "sliding_window": 4096, **fields.values}, fields.source), 2
    )
    return read_gemma(fields, GEMMA2, 8192, softcaps=(50.0, 30.0))


def parse_gemma3(fields: Fields) -> ModelConfig:
    """Read the config.json of a Gemma 3 text model; every sixth layer has full attention.

    Layers with a sliding window have another rotary embedding than layers with full attention.
    """
    defaults = {"head_dim": 256, "sliding_window": 4096}
    period = fields.integer("sliding_window_pattern", 6)
    fields = set_layer_types(Fields({**defaults, **fields.values}, fields.source), period)
    block = BlockConfig(qk_norm=QKNorm.HEAD, qk_norm_kind=NormKind.RMS_PLUS_ONE)
    return read_gemma(
        fields,
        GEMMA3,
        131072,
        softcaps=(None, None),
        block=block,
        ropes=read_ropes(fields),
        rope_by_layer=mark_layers(fields, "sliding_attention"),
    )


def read_ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """Read Gemma 3's rotary embeddings of layers with full attention and with a sliding window.

    `rope_parameters` holds one object for each type of layer; older files have `rope_theta`, `rope_scaling`
    and `rope_local_base_freq`.
    """
    head_dim = read_heads(fields)[2]
    by_type = read_ropes_by_layer_type(fields, head_dim, full_theta=GLOBAL_THETA, sliding_theta=LOCAL_THETA)
    local = RopeConfig(theta=fields.number("rope_local_base_freq", LOCAL_THETA))
    return by_type or (read_rope(fields, head_dim, theta=GLOBAL_THETA), local)


def read_gemma(
    fields: Fields,
    architecture: str,
    context_length: int,
    *,
    softcaps: tuple[float | None, float | None],
    block: BlockConfig | None = None,
    ropes: tuple[RopeConfig, ...] | None = None,
    rope_by_layer: tuple[int, ...] = (),
) -> ModelConfig:
    """Read what Gemma 2 and 3 share; `softcaps` has the defaults of the caps of scores and of logits."""
    if fields.flag("use_bidirectional_attention"):
        raise fields.error("use_bidirectional_attention", "must be false: attention must be causal")
    block = replace(
        block or BlockConfig(),
        norm=NormKind.RMS_PLUS_ONE,
        placement=NormPlacement.SANDWICH,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=fields.optional_number("attn_logit_softcapping", softcaps[0]),
        names=NAMES,
    )
    config = read_decoder_config(
        fields,
        architecture,
        attention_bias=fields.flag("attention_bias"),
        context_length=context_length,
        tie_embeddings=True,
        activation="gelu_pytorch_tanh",
        block=block,
        ropes=ropes,
        rope_by_layer=rope_by_layer,
    )
    return replace(
        config,
        embedding_multiplier=math.sqrt(config.hidden_size),
        rounds_embedding_multiplier=True,
        logits_softcap=fields.optional_number("final_logit_softcapping", softcaps[1]),
    )
