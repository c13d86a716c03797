# SPDX-License-Identifier: Apache-2.0
"""Granite 3 and 4 without experts (IBM): Llama with multipliers of embeddings, outputs, scores and logits."""

from __future__ import annotations

from dataclasses import replace

from mizzen.models.block import BlockConfig
from mizzen.models.config import ModelConfig, read_decoder_config
from mizzen.models.hf_fields import Fields

ARCHITECTURE = "GraniteForCausalLM"


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Granite model."""
    block = BlockConfig(
        attention_scale=fields.number("attention_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
    )
    config = read_decoder_config(
        fields,
        ARCHITECTURE,
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        block=block,
    )
    return replace(
        config,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logits_multiplier=1 / fields.number("logits_scaling", 1.0),
    )
