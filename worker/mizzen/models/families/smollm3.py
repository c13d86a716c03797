# SPDX-License-Identifier: Apache-2.0
"""SmolLM3 (Hugging Face): Llama without rotary embedding in every fourth layer."""

from __future__ import annotations

from mizzen.models.config import ModelConfig, read_decoder_config, read_heads, read_layer_count
from mizzen.models.hf_fields import Fields
from mizzen.models.rope_config import RopeConfig, read_rope

ARCHITECTURE = "SmolLM3ForCausalLM"


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a SmolLM3 model.

    `no_rope_layers` lists a 1 for every layer with rotary embedding. If `use_sliding_window` is true, the
    other layers have a sliding window.

    Raises:
        ConfigError: a field is missing, invalid or not supported; the message names the field.
    """
    fields = Fields({"num_key_value_heads": 4, **fields.values}, fields.source)
    layers, period = read_layer_count(fields), fields.integer("no_rope_layer_interval", 4)
    flags = fields.values.get("no_rope_layers") or [int((i + 1) % period != 0) for i in range(layers)]
    if not isinstance(flags, list) or len(flags) != layers or any(flag not in (0, 1) for flag in flags):
        raise fields.error("no_rope_layers", f"must list {layers} times 0 or 1")
    window = fields.optional_integer("sliding_window") if fields.flag("use_sliding_window") else None
    kinds = ["full_attention" if window is None or flag else "sliding_attention" for flag in flags]
    fields = Fields({"layer_types": kinds, **fields.values}, fields.source)
    return read_decoder_config(
        fields,
        ARCHITECTURE,
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        context_length=32768,
        tie_embeddings=True,
        ropes=(read_rope(fields, read_heads(fields)[2], theta=2_000_000.0), RopeConfig(kind="none")),
        rope_by_layer=tuple(1 - flag for flag in flags),
    )
