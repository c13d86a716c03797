# SPDX-License-Identifier: Apache-2.0
"""Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905): Llama with fused projections and longrope."""

from __future__ import annotations

from mizzen.models.block import BlockConfig, TensorNames
from mizzen.models.config import ModelConfig, read_decoder_config, read_heads
from mizzen.models.hf_fields import Fields
from mizzen.models.rope_config import read_rope

ARCHITECTURE = "Phi3ForCausalLM"
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
