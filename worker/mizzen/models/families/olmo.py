# SPDX-License-Identifier: Apache-2.0
"""OLMo 2 (arXiv 2501.00656), OLMo 3 and OLMoE (arXiv 2409.02060): QK norm over all heads together.

OLMo 2 and 3 have norms behind each block; OLMoE has them before each block, and experts.
"""

from __future__ import annotations

from dataclasses import replace

from mizzen.models.block import BlockConfig, NormPlacement, QKNorm
from mizzen.models.config import ModelConfig, mark_layers, read_decoder_config, read_heads, set_layer_types
from mizzen.models.experts_config import ExpertsConfig, check_experts
from mizzen.models.hf_fields import Fields
from mizzen.models.rope_config import RopeConfig, read_rope, read_ropes_by_layer_type

OLMO2, OLMO3, OLMOE = "Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoeForCausalLM"
BLOCK = BlockConfig(placement=NormPlacement.POST, qk_norm=QKNorm.FULL)
THETA = 500_000.0
"""Default of `rope_theta` in OLMo 3."""


def parse_olmo2(fields: Fields) -> ModelConfig:
    """Read the config.json of an OLMo 2 model."""
    return read_olmo(fields, OLMO2)


def parse_olmo3(fields: Fields) -> ModelConfig:
    """Read the config.json of an OLMo 3 model; every fourth layer has full attention.

    Only layers with full attention have a rotary embedding that is extended to longer contexts.
    """
    fields = set_layer_types(Fields({"sliding_window": 4096, **fields.values}, fields.source), 4)
    head_dim = read_heads(fields)[2]
    ropes = read_ropes_by_layer_type(fields, head_dim, full_theta=THETA, sliding_theta=THETA)
    if ropes is None:
        full = read_rope(fields, head_dim, theta=THETA)
        ropes = (full, RopeConfig(theta=full.theta))
    return read_olmo(fields, OLMO3, ropes, mark_layers(fields, "sliding_attention"))


def read_olmo(
    fields: Fields,
    architecture: str,
    ropes: tuple[RopeConfig, ...] | None = None,
    rope_by_layer: tuple[int, ...] = (),
) -> ModelConfig:
    """Read what OLMo 2 and 3 share."""
    return read_decoder_config(
        fields,
        architecture,
        attention_bias=fields.flag("attention_bias"),
        norm_epsilon=fields.number("rms_norm_eps", 1e-5),
        block=BLOCK,
        ropes=ropes,
        rope_by_layer=rope_by_layer,
    )


def parse_olmoe(fields: Fields) -> ModelConfig:
    """Read the config.json of an OLMoE model.

    Raises:
        ConfigError: a field is missing, invalid or not supported; the message names the field.
    """
    if fields.values.get("clip_qkv") is not None:
        raise fields.error("clip_qkv", "must be null: limits of queries, keys and values are not supported")
    config = read_decoder_config(
        fields,
        OLMOE,
        attention_bias=fields.flag("attention_bias"),
        context_length=4096,
        norm_epsilon=fields.number("rms_norm_eps", 1e-5),
        block=BlockConfig(qk_norm=QKNorm.FULL),
    )
    count = fields.first_set(("num_experts", "num_local_experts"))
    experts = ExpertsConfig(
        count=fields.integer(count, 64),
        per_token=fields.integer("num_experts_per_tok", 8),
        width=config.intermediate_size,
        width_field="intermediate_size",
        layers=(True,) * config.layers,
        renormalize=fields.flag("norm_topk_prob"),
    )
    return replace(config, experts=check_experts(fields, experts, count=count))
