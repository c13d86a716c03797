# SPDX-License-Identifier: Apache-2.0
"""Mistral (arXiv 2310.06825), Mixtral and Ministral 3: Llama with an optional window in every layer."""

from __future__ import annotations

from dataclasses import replace

from mizzen.models.block import BlockConfig
from mizzen.models.config import ModelConfig, read_decoder_config, read_heads
from mizzen.models.experts_config import ExpertNames, ExpertsConfig, check_experts
from mizzen.models.hf_fields import Fields
from mizzen.models.rope_config import original_context, read_rope, rope_fields

ARCHITECTURE, MINISTRAL3 = "MistralForCausalLM", "Ministral3ForCausalLM"
MIXTRAL = "MixtralForCausalLM"
MIXTRAL_NAMES = ExpertNames(block="block_sparse_moe", gate_up=("w1", "w3"), down="w2")


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Mistral model.

    If `sliding_window` is null, attention is full; if it is absent, the window is 4096 tokens.
    """
    window = fields.optional_integer("sliding_window", 4096)
    return read_decoder_config(fields, ARCHITECTURE, window=window, context_length=131072)


def parse_ministral3(fields: Fields) -> ModelConfig:
    """Read the config.json of a Ministral 3 model.

    Queries grow with their positions if `rope_parameters` has `llama_4_scaling_beta`.
    """
    fields = Fields({"head_dim": 128, "num_key_value_heads": 8, **fields.values}, fields.source)
    rope, scaling = rope_fields(fields), None
    if rope.values.get("llama_4_scaling_beta"):
        scaling = (rope.number("llama_4_scaling_beta"), original_context(fields, rope))
    return read_decoder_config(
        fields,
        MINISTRAL3,
        window=fields.optional_integer("sliding_window"),
        context_length=262144,
        norm_epsilon=fields.number("rms_norm_eps", 1e-5),
        block=BlockConfig(query_scaling=scaling),
        ropes=(read_rope(fields, fields.integer("head_dim"), theta=1_000_000.0),),
    )


def parse_mixtral(fields: Fields) -> ModelConfig:
    """Read the config.json of a Mixtral model (arXiv 2401.04088)."""
    fields = Fields({"num_key_value_heads": 8, **fields.values}, fields.source)
    config = read_decoder_config(
        fields,
        MIXTRAL,
        window=fields.optional_integer("sliding_window"),
        context_length=131072,
        norm_epsilon=fields.number("rms_norm_eps", 1e-5),
        ropes=(read_rope(fields, read_heads(fields)[2], theta=1_000_000.0),),
    )
    experts = ExpertsConfig(
        count=fields.integer("num_local_experts", 8),
        per_token=fields.integer("num_experts_per_tok", 2),
        width=config.intermediate_size,
        width_field="intermediate_size",
        layers=(True,) * config.layers,
        names=MIXTRAL_NAMES,
    )
    return replace(config, experts=check_experts(fields, experts, count="num_local_experts"))
