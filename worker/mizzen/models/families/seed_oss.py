# SPDX-License-Identifier: Apache-2.0
"""Seed-OSS (ByteDance): Llama with biases of queries, keys and values, and a separate head dim."""

from __future__ import annotations

from mizzen.models.config import ModelConfig, read_decoder_config
from mizzen.models.hf_fields import Fields

ARCHITECTURE = "SeedOssForCausalLM"


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Seed-OSS model."""
    fields = Fields({"head_dim": 128, "num_key_value_heads": 8, **fields.values}, fields.source)
    return read_decoder_config(
        fields,
        ARCHITECTURE,
        qkv_bias=fields.flag("attention_bias", True),
        output_bias=fields.flag("attention_out_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        context_length=524288,
    )
