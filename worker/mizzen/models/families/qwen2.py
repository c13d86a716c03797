# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from mizzen.models.config import ModelConfig, read_decoder_config
from mizzen.models.hf_fields import Fields

ARCHITECTURE = "Qwen2ForCausalLM"


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Qwen2 model."""
    return read_upper_windows(
        fields, read_decoder_config(fields, ARCHITECTURE, qkv_bias=True, context_length=32768)
    )


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
    first = fields.values.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise fields.error("max_window_layers", "must be an integer of 0 or more")
    window = fields.integer("sliding_window", 4096)
    return replace(config, windows=tuple(window if i >= first else None for i in range(config.layers)))
