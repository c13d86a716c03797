# SPDX-License-Identifier: Apache-2.0
"""Llama (arXiv 2302.13971, 2407.21783): the decoder from which the other families are derived."""

from __future__ import annotations

from mizzen.models.config import ModelConfig, read_decoder_config
from mizzen.models.hf_fields import Fields

ARCHITECTURE = "LlamaForCausalLM"


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Llama model."""
    return read_decoder_config(
        fields,
        ARCHITECTURE,
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
    )
