# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from mizzen.models.config import ModelConfig, read_decoder_config, read_layer_count
from mizzen.models.experts_config import (
    ExpertNames,
    ExpertsConfig,
    check_experts,
    read_amount,
    read_sparse_layers,
)
from mizzen.models.hf_fields import Fields

ARCHITECTURE, MOE = "Qwen2ForCausalLM", "Qwen2MoeForCausalLM"
SHARED_NAMES = ExpertNames(shared="shared_expert")


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Qwen2 model."""
    return read_upper_windows(
        fields, read_decoder_config(fields, ARCHITECTURE, qkv_bias=True, context_length=32768)
    )


def parse_moe(fields: Fields) -> ModelConfig:
    """Read the config.json of a Qwen1.5 or Qwen2 model with experts, such as Qwen1.5-MoE-A2.7B.

    With `use_sliding_window` and without `layer_types`, every second of the lower layers has a window.
    """
    layers, bound = read_layer_count(fields), read_amount(fields, "max_window_layers", 28)
    if fields.flag("use_sliding_window") and fields.values.get("layer_types") is None:
        windows = [layer % 2 == 0 and layer < bound for layer in range(layers)]
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        fields = Fields({"sliding_window": 4096, **fields.values, "layer_types": kinds}, fields.source)
    config = read_decoder_config(fields, MOE, qkv_bias=fields.flag("qkv_bias", True), context_length=32768)
    experts = replace(
        read_qwen_experts(fields, layers),
        shared_width=fields.integer("shared_expert_intermediate_size", 5632),
        shared_field="shared_expert_intermediate_size",
        shared_gate=True,
        names=SHARED_NAMES,
    )
    return replace(config, experts=experts)


def read_upper_windows(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the sliding windows that the Qwen family gives to its upper layers.

    If config.json has `layer_types`, the configuration is returned unchanged. Otherwise, if
    `use_sliding_window` is true, layers from `max_window_layers` on have the window `sliding_window`, or no
    window if that is null. If `use_sliding_window` is false, `sliding_window` has no effect.

    Raises:
        ConfigError: one of these fields is invalid.
    """
    if fields.values.get("layer_types") is not None or not fields.flag("use_sliding_window"):
        return config
    if fields.values.get("sliding_window", 4096) is None:
        return config
    first = read_amount(fields, "max_window_layers", 28)
    window = fields.integer("sliding_window", 4096)
    return replace(config, windows=tuple(window if i >= first else None for i in range(config.layers)))


def read_qwen_experts(fields: Fields, layers: int) -> ExpertsConfig:
    """Read the fields of the experts of Qwen2 and Qwen3.

    Raises:
        ConfigError: a field is missing, invalid or not supported; the message names the field.
    """
    count = fields.first_set(("num_experts", "num_local_experts"))
    experts = ExpertsConfig(
        count=fields.integer(count),
        per_token=fields.integer("num_experts_per_tok"),
        width=fields.integer("moe_intermediate_size"),
        layers=read_sparse_layers(fields, layers),
        renormalize=fields.flag("norm_topk_prob"),
    )
    return check_experts(fields, experts, count=count)
