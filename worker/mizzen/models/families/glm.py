# SPDX-License-Identifier: Apache-2.0
"""GLM-4 (arXiv 2406.12793): partial, interleaved rotary embedding; GLM-4-0414 adds norms after blocks."""

from __future__ import annotations

from mizzen.models.block import BlockConfig, NormPlacement, TensorNames
from mizzen.models.config import ModelConfig, read_decoder_config, read_heads
from mizzen.models.hf_fields import Fields
from mizzen.models.rope_config import read_rope

GLM, GLM4 = "GlmForCausalLM", "Glm4ForCausalLM"
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
