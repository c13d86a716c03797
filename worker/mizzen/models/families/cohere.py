# SPDX-License-Identifier: Apache-2.0
"""Command R (Cohere), Command R7B and Command A (Cohere 2): LayerNorm, and parallel blocks."""

from __future__ import annotations

from dataclasses import replace

from mizzen.models.block import BlockConfig, NormKind, NormPlacement, QKNorm
from mizzen.models.config import ModelConfig, mark_layers, read_decoder_config, read_heads, set_layer_types
from mizzen.models.hf_fields import Fields
from mizzen.models.rope_config import RopeConfig, read_rope

COHERE, COHERE2 = "CohereForCausalLM", "Cohere2ForCausalLM"
BLOCK = BlockConfig(norm=NormKind.LAYER, placement=NormPlacement.PARALLEL)
THETA = 500_000.0


def parse_cohere(fields: Fields) -> ModelConfig:
    """Read the config.json of a Cohere model."""
    qk_norm = QKNorm.HEADWISE if fields.flag("use_qk_norm") else None
    rope = read_rope(fields, read_heads(fields)[2], theta=THETA, interleaved=True)
    return read_cohere(fields, COHERE, replace(BLOCK, qk_norm=qk_norm), (rope,))


def parse_cohere2(fields: Fields) -> ModelConfig:
    """Read the config.json of a Cohere 2 model; layers with full attention have no rotary embedding."""
    period = fields.integer("sliding_window_pattern", 4)
    fields = set_layer_types(Fields({"sliding_window": 4096, **fields.values}, fields.source), period)
    rope = read_rope(fields, read_heads(fields)[2], theta=THETA, interleaved=True)
    by_layer = mark_layers(fields, "full_attention")
    return read_cohere(fields, COHERE2, BLOCK, (rope, RopeConfig(kind="none")), by_layer)


def read_cohere(
    fields: Fields,
    architecture: str,
    block: BlockConfig,
    ropes: tuple[RopeConfig, ...],
    rope_by_layer: tuple[int, ...] = (),
) -> ModelConfig:
    """Read what both generations share."""
    config = read_decoder_config(
        fields,
        architecture,
        attention_bias=fields.flag("attention_bias"),
        context_length=8192,
        tie_embeddings=True,
        norm_epsilon=fields.number("layer_norm_eps", 1e-5),
        block=block,
        ropes=ropes,
        rope_by_layer=rope_by_layer,
    )
    return replace(config, logits_multiplier=fields.number("logit_scale", 0.0625))
