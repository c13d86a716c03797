# SPDX-License-Identifier: Apache-2.0
"""Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905): Llama with fused projections and longrope; Phi-3.5-MoE."""

from __future__ import annotations

from dataclasses import replace

from mizzen.models.block import BlockConfig, NormKind, TensorNames
from mizzen.models.config import ModelConfig, read_decoder_config, read_heads
from mizzen.models.experts_config import ExpertNames, ExpertsConfig, Scoring, check_experts
from mizzen.models.hf_fields import Fields
from mizzen.models.rope_config import RopeConfig, read_rope, rope_fields

ARCHITECTURE = "Phi3ForCausalLM"
MOE = "PhimoeForCausalLM"
OLD_MOE = "PhiMoEForCausalLM"
"""Name of the class in the code of Microsoft's checkpoints, which they list."""
MOE_EXPERTS_PER_TOKEN = 2
NAMES = TensorNames(
    query_key_value=("qkv_proj", "qkv_proj", "qkv_proj"), gate_up=("gate_up_proj", "gate_up_proj")
)


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Phi-3 or Phi-4 model."""
    return read_decoder_config(
        fields,
        ARCHITECTURE,
        window=fields.optional_integer("sliding_window"),
        context_length=4096,
        norm_epsilon=fields.number("rms_norm_eps", 1e-5),
        block=BlockConfig(names=NAMES),
        ropes=(read_rope(fields, read_heads(fields)[2], rotary_fraction=1.0),),
    )


def parse_moe(fields: Fields) -> ModelConfig:
    """Read the config.json of a Phi-3.5-MoE model (arXiv 2404.14219).

    Raises:
        ConfigError: a field is missing, invalid or not supported; the message names the field.
    """
    fields = Fields({"num_key_value_heads": 8, **fields.values}, fields.source)
    config = read_decoder_config(
        fields,
        MOE,
        window=fields.optional_integer("sliding_window"),
        attention_bias=fields.flag("attention_bias"),
        context_length=131072,
        norm_epsilon=fields.number("rms_norm_eps", 1e-5),
        block=BlockConfig(norm=NormKind.LAYER, norm_bias=True),
        ropes=(read_moe_rope(fields),),
    )
    head_bias = fields.flag("lm_head_bias")
    if head_bias and config.tie_embeddings:
        raise fields.error("lm_head_bias", "must be false with tie_word_embeddings")
    per_token = fields.integer("num_experts_per_tok", MOE_EXPERTS_PER_TOKEN)
    if per_token != MOE_EXPERTS_PER_TOKEN:
        raise fields.error("num_experts_per_tok", f"must be {MOE_EXPERTS_PER_TOKEN}, as in Transformers")
    experts = ExpertsConfig(
        count=fields.integer("num_local_experts", 16),
        per_token=per_token,
        width=config.intermediate_size,
        width_field="intermediate_size",
        layers=(True,) * config.layers,
        scoring=Scoring.SPARSEMIXER,
        jitter=fields.number("router_jitter_noise", 0.01),
        names=ExpertNames(block="block_sparse_moe", gate_up=("w1", "w3"), down="w2"),
    )
    experts = check_experts(fields, experts, count="num_local_experts")
    return replace(config, head_bias=head_bias, experts=experts)


def read_moe_rope(fields: Fields) -> RopeConfig:
    """Read the rotary embedding of Phi-3.5-MoE, whose factors of cosines and sines are in config.json.

    Raises:
        ConfigError: a field is missing or invalid, or the embedding is neither `default` nor `longrope`.
    """
    rope, given = read_rope(fields, read_heads(fields)[2], theta=1_000_000.0), rope_fields(fields)
    if rope.kind == "default":
        return rope
    if rope.kind != "longrope":
        raise given.error(given.first_set(("rope_type", "type")), "must be default or longrope")
    return replace(
        rope,
        attention_factor=given.number("short_mscale"),
        long_attention_factor=given.number("long_mscale"),
    )
