# SPDX-License-Identifier: Apache-2.0
"""EXAONE 4 (arXiv 2507.11407): norms behind each block, QK norm, and layers without rotary embedding."""

from __future__ import annotations

import re

from mizzen.models.block import BlockConfig, NormPlacement, QKNorm
from mizzen.models.config import ModelConfig, mark_layers, read_decoder_config, read_heads, set_layer_types
from mizzen.models.hf_fields import Fields
from mizzen.models.rope_config import RopeConfig, read_rope

ARCHITECTURE = "Exaone4ForCausalLM"


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of an EXAONE 4 model.

    In models with sliding windows, layers with full attention have no rotary embedding.

    Raises:
        ConfigError: a field is missing, invalid or not supported; the message names the field.
    """
    fields = Fields({"sliding_window": 4096, **fields.values}, fields.source)
    ropes: tuple[RopeConfig, ...] = (read_rope(fields, read_heads(fields)[2]),)
    by_layer: tuple[int, ...] = ()
    if fields.values["sliding_window"] is not None:
        if fields.values.get("layer_types") is None:
            fields = set_layer_types(fields, read_period(fields), last_is_full=True)
        ropes += (RopeConfig(kind="none"),)
        by_layer = mark_layers(fields, "full_attention")
    return read_decoder_config(
        fields,
        ARCHITECTURE,
        norm_epsilon=fields.number("rms_norm_eps", 1e-5),
        block=BlockConfig(placement=NormPlacement.POST, qk_norm=QKNorm.HEAD),
        ropes=ropes,
        rope_by_layer=by_layer,
    )


def read_period(fields: Fields) -> int:
    """Read from `sliding_window_pattern` how many layers follow each other until one has full attention.

    The field is that number, or a text with a letter for each of these layers, such as "LLLG" for 4.

    Raises:
        ConfigError: the field is neither.
    """
    pattern = fields.values.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        if not re.fullmatch("L*G", pattern):
            raise fields.error("sliding_window_pattern", "must be a positive integer or a text such as LLLG")
        return len(pattern)
    return fields.integer("sliding_window_pattern", 4)
