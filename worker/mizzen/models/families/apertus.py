# SPDX-License-Identifier: Apache-2.0
"""Apertus (arXiv 2509.14233): Llama with QK norm, and xIELU without a gate."""

from __future__ import annotations

from mizzen.models.block import BlockConfig, QKNorm, TensorNames
from mizzen.models.config import ModelConfig, read_decoder_config, read_heads
from mizzen.models.hf_fields import Fields
from mizzen.models.rope_config import read_rope

ARCHITECTURE = "ApertusForCausalLM"
BLOCK = BlockConfig(
    qk_norm=QKNorm.HEAD,
    names=TensorNames(
        gate_up=("up_proj",), attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm"
    ),
)
DEFAULT_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of an Apertus model."""
    if fields.values.get("rope_parameters") is None and fields.values.get("rope_scaling") is None:
        fields = Fields({**fields.values, "rope_parameters": DEFAULT_ROPE}, fields.source)
    return read_decoder_config(
        fields,
        ARCHITECTURE,
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        context_length=65536,
        norm_epsilon=fields.number("rms_norm_eps", 1e-5),
        activation="xielu",
        block=BLOCK,
        ropes=(read_rope(fields, read_heads(fields)[2], theta=12_000_000.0),),
    )
