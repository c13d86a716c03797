# SPDX-License-Identifier: Apache-2.0
"""Qwen3 (arXiv 2505.09388): Qwen2 without biases, with RMSNorm on each head of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from mizzen.models.block import BlockConfig, QKNorm
from mizzen.models.config import ModelConfig, read_decoder_config
from mizzen.models.families.qwen2 import read_qwen_experts, read_upper_windows
from mizzen.models.hf_fields import Fields

ARCHITECTURE, MOE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a dense Qwen3 model; the default head dim is 128."""
    return read_upper_windows(
        fields, read_qwen3(Fields({"head_dim": 128, **fields.values}, fields.source), ARCHITECTURE)
    )


def parse_moe(fields: Fields) -> ModelConfig:
    """Read the config.json of a Qwen3 model with experts, such as Qwen3-30B-A3B.

    With `use_sliding_window`, all layers have a sliding window.
    """
    config = read_qwen3(fields, MOE)
    window = fields.optional_integer("sliding_window", 4096) if fields.flag("use_sliding_window") else None
    return replace(
        config, windows=(window,) * config.layers, experts=read_qwen_experts(fields, config.layers)
    )


def read_qwen3(fields: Fields, architecture: str) -> ModelConfig:
    """Read what both kinds of models share."""
    return read_decoder_config(
        fields,
        architecture,
        attention_bias=fields.flag("attention_bias"),
        block=BlockConfig(qk_norm=QKNorm.HEAD),
        context_length=32768,
    )
