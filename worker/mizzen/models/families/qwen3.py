# SPDX-License-Identifier: Apache-2.0
"""Qwen3 (arXiv 2505.09388): Qwen2 without biases, with RMSNorm on each head of queries and keys."""

from __future__ import annotations

from mizzen.models.block import BlockConfig, QKNorm
from mizzen.models.config import ModelConfig, read_decoder_config
from mizzen.models.families.qwen2 import read_upper_windows
from mizzen.models.hf_fields import Fields

ARCHITECTURE = "Qwen3ForCausalLM"


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Qwen3 model; the default head dim is 128."""
    fields = Fields({"head_dim": 128, **fields.values}, fields.source)
    config = read_decoder_config(
        fields,
        ARCHITECTURE,
        attention_bias=fields.flag("attention_bias"),
        block=BlockConfig(qk_norm=QKNorm.HEAD),
        context_length=32768,
    )
    return read_upper_windows(fields, config)
