# SPDX-License-Identifier: Apache-2.0
"""Hunyuan without experts (Tencent): Llama with QK norm behind the rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from mizzen.models.block import BlockConfig, QKNorm, TensorNames
from mizzen.models.config import ModelConfig, read_decoder_config, read_heads
from mizzen.models.hf_fields import Fields
from mizzen.models.rope_config import RopeConfig, read_rope, rope_fields

ARCHITECTURE = "HunYuanDenseV1ForCausalLM"
BLOCK = BlockConfig(
    qk_norm=QKNorm.HEAD,
    qk_norm_after_rope=True,
    names=TensorNames(query_key_norm=("query_layernorm", "key_layernorm")),
)


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Hunyuan model."""
    return read_decoder_config(
        fields,
        ARCHITECTURE,
        attention_bias=fields.flag("attention_bias"),
        norm_epsilon=fields.number("rms_norm_eps", 1e-5),
        block=BLOCK,
        ropes=(read_hunyuan_rope(fields),),
    )


def read_hunyuan_rope(fields: Fields) -> RopeConfig:
    """Read the rotary embedding; with `alpha`, the kind "dynamic" has a larger base at all lengths."""
    head_dim, rope = read_heads(fields)[2], rope_fields(fields)
    if rope.values.get("rope_type", rope.values.get("type")) != "dynamic" or not rope.values.get("alpha"):
        return read_rope(fields, head_dim)
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    base = theta * rope.number("alpha") ** (head_dim / (head_dim - 2))
    return replace(RopeConfig(), theta=base)
