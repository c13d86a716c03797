# SPDX-License-Identifier: Apache-2.0
"""GLM-4 (arXiv 2406.12793): partial rotary embedding; GLM-4-0414 adds norms after blocks, GLM-4.5 experts."""

from __future__ import annotations

from dataclasses import replace

from mizzen.models.block import BlockConfig, NormPlacement, QKNorm, TensorNames
from mizzen.models.config import ModelConfig, read_decoder_config, read_heads
from mizzen.models.experts_config import ExpertsConfig, Scoring, check_experts, read_amount
from mizzen.models.hf_fields import Fields
from mizzen.models.rope_config import read_rope

GLM, GLM4, GLM4_MOE = "GlmForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM"
GATE_UP = ("gate_up_proj",) * 2
GLM_BLOCK = BlockConfig(names=TensorNames(gate_up=GATE_UP))
GLM4_BLOCK = BlockConfig(
    placement=NormPlacement.SANDWICH,
    names=TensorNames(
        gate_up=GATE_UP, after_attention_norm="post_self_attn_layernorm", after_mlp_norm="post_mlp_layernorm"
    ),
)


def parse_glm(fields: Fields) -> ModelConfig:
    """Read the config.json of a GLM-4 model of 2024."""
    return read_glm(fields, GLM, GLM_BLOCK)


def parse_glm4(fields: Fields) -> ModelConfig:
    """Read the config.json of a GLM-4-0414 model."""
    return read_glm(fields, GLM4, GLM4_BLOCK)


def read_glm(fields: Fields, architecture: str, block: BlockConfig) -> ModelConfig:
    """Read what both generations share."""
    fields = Fields({"head_dim": 128, "num_key_value_heads": 2, **fields.values}, fields.source)
    return read_decoder_config(
        fields,
        architecture,
        qkv_bias=fields.flag("attention_bias", True),
        context_length=131072,
        norm_epsilon=fields.number("rms_norm_eps", 1.5625e-7),
        block=block,
        ropes=(read_rope(fields, read_heads(fields)[2], rotary_fraction=0.5, interleaved=True),),
    )


def parse_moe(fields: Fields) -> ModelConfig:
    """Read the config.json of a GLM-4.5, 4.6 or 4.7 model (arXiv 2508.06471).

    Its layers for multi-token prediction, which follow the others, are not loaded.

    Raises:
        ConfigError: a field is missing, invalid or not supported; the message names the field.
    """
    config = read_decoder_config(
        fields,
        GLM4_MOE,
        qkv_bias=fields.flag("attention_bias"),
        context_length=131072,
        norm_epsilon=fields.number("rms_norm_eps", 1e-5),
        block=BlockConfig(qk_norm=QKNorm.HEAD if fields.flag("use_qk_norm") else None),
        ropes=(read_rope(fields, read_heads(fields)[2], rotary_fraction=0.5),),
    )
    dense, width = read_amount(fields, "first_k_dense_replace", 1), fields.integer("moe_intermediate_size")
    count = fields.first_set(("n_routed_experts", "num_local_experts"))
    experts = ExpertsConfig(
        count=fields.integer(count),
        per_token=fields.integer("num_experts_per_tok"),
        width=width,
        layers=tuple(layer >= dense for layer in range(config.layers)),
        scoring=Scoring.SIGMOID,
        correction_bias=True,
        groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
        renormalize=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        float32_router=True,
        shared_width=width * read_amount(fields, "n_shared_experts", 1),
    )
    extra = read_amount(fields, fields.first_set(("num_nextn_predict_layers", "num_mtp_layers")), 1)
    further_layers = range(config.layers, config.layers + extra)
    return replace(
        config,
        experts=check_experts(fields, experts, count=count),
        ignored_tensors=tuple(rf"(^|\.)layers\.{layer}\." for layer in further_layers),
    )
