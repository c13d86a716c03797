# SPDX-License-Identifier: Apache-2.0
"""MiniMax-M2: experts in all layers, QK norm over all heads together, and a partial rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from mizzen.models.block import BlockConfig, QKNorm
from mizzen.models.config import ModelConfig, read_decoder_config
from mizzen.models.experts_config import ExpertNames, ExpertsConfig, Scoring, check_experts
from mizzen.models.hf_fields import Fields
from mizzen.models.rope_config import read_rope

ARCHITECTURE = "MiniMaxM2ForCausalLM"
NAMES = ExpertNames(
    block="block_sparse_moe", correction_bias="e_score_correction_bias", gate_up=("w1", "w3"), down="w2"
)


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a MiniMax-M2 model.

    `rotary_dim` gives the number of rotated elements of a head, if there is no `partial_rotary_factor`.

    Raises:
        ConfigError: a field is missing, invalid or not supported; the message names the field.
    """
    fields = Fields({"head_dim": 128, **fields.values}, fields.source)
    head_dim = fields.integer("head_dim")
    fraction = fields.integer("rotary_dim", head_dim) / head_dim
    config = read_decoder_config(
        fields,
        ARCHITECTURE,
        context_length=196608,
        block=BlockConfig(qk_norm=QKNorm.FULL),
        ropes=(read_rope(fields, head_dim, theta=5_000_000.0, rotary_fraction=fraction),),
    )
    experts = ExpertsConfig(
        count=fields.integer("num_local_experts"),
        per_token=fields.integer("num_experts_per_tok"),
        width=config.intermediate_size,
        width_field="intermediate_size",
        layers=(True,) * config.layers,
        scoring=Scoring.SIGMOID,
        correction_bias=True,
        names=NAMES,
    )
    return replace(config, experts=check_experts(fields, experts, count="num_local_experts"))
