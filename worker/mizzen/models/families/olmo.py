# SPDX-License-Identifier: Apache-2.0
"""OLMo 2 (arXiv 2501.00656) and OLMo 3: norms behind each block, and QK norm over all heads together."""

from __future__ import annotations

from mizzen.models.block import BlockConfig, NormPlacement, QKNorm
from mizzen.models.config import ModelConfig, mark_layers, read_decoder_config, read_heads, set_layer_types
from mizzen.models.hf_fields import Fields
from mizzen.models.rope_config import RopeConfig, read_rope, read_ropes_by_layer_type

OLMO2, OLMO3 = "Olmo2ForCausalLM", "Olmo3ForCausalLM"
BLOCK = BlockConfig(placement=NormPlacement.POST, qk_norm=QKNorm.FULL)
THETA = 500_000.0
"""Default of `rope_theta` in OLMo 3."""


def parse_olmo2(fields: Fields) -> ModelConfig:
    """Read the config.json of an OLMo 2 model."""
    return read_olmo(fields, OLMO2)


def parse_olmo3(fields: Fields) -> ModelConfig:
    """Read the config.json of an OLMo 3 model; every fourth layer has full attention.

    Only layers with full attention have a rotary embedding that is extended to longer contexts.
    """
    fields = set_layer_types(Fields({"sliding_window": 4096, **fields.values}, fields.source), 4)
    head_dim = read_heads(fields)[2]
    ropes = read_ropes_by_layer_type(fields, head_dim, full_theta=THETA, sliding_theta=THETA)
    if ropes is None:
        full = read_rope(fields, head_dim, theta=THETA)
        ropes = (full, RopeConfig(theta=full.theta))
    return read_olmo(fields, OLMO3, ropes, mark_layers(fields, "sliding_attention"))


def read_olmo(
    fields: Fields,
    architecture: str,
    ropes: tuple[RopeConfig, ...] | None = None,
    rope_by_layer: tuple[int, ...] = (),
) -> ModelConfig:
    """Read what OLMo 2 and 3 share."""
    return read_decoder_config(
        fields,
        architecture,
        attention_bias=fields.flag("attention_bias"),
        norm_epsilon=fields.number("rms_norm_eps", 1e-5),
        block=BLOCK,
        ropes=ropes,
        rope_by_layer=rope_by_layer,
    )
