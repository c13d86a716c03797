# SPDX-License-Identifier: Apache-2.0
"""Nemotron 4 and Minitron (arXiv 2402.16819): LayerNorm of 1 + weight, squared ReLU without a gate."""

from __future__ import annotations

from mizzen.models.block import BlockConfig, NormKind, TensorNames
from mizzen.models.config import ModelConfig, read_decoder_config, read_heads
from mizzen.models.hf_fields import Fields
from mizzen.models.rope_config import read_rope

ARCHITECTURE = "NemotronForCausalLM"
BLOCK = BlockConfig(norm=NormKind.LAYER_PLUS_ONE, norm_bias=True, names=TensorNames(gate_up=("up_proj",)))


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Nemotron model; half of each head is rotated by default."""
    return read_decoder_config(
        fields,
        ARCHITECTURE,
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        context_length=4096,
        norm_epsilon=fields.number("norm_eps", 1e-5),
        activation="relu2",
        block=BLOCK,
        ropes=(read_rope(fields, read_heads(fields)[2], rotary_fraction=0.5),),
    )
