# SPDX-License-Identifier: Apache-2.0
"""GTE v1.5 and gte-multilingual (arXiv 2407.19669): BERTs with rotary embeddings and gated blocks.

Checkpoints call the architecture `New` in the code of their repository, and Transformers calls it `Gte`.
"""

from __future__ import annotations

from dataclasses import replace

from mizzen.models.config import ModelConfig, read_layer_count
from mizzen.models.encoders.config import (
    check_absolute_positions,
    encoder_config,
    is_classifier,
    read_encoder_activation,
)
from mizzen.models.encoders.description import EncoderConfig, EncoderNames, HeadConfig
from mizzen.models.hf_fields import Fields
from mizzen.models.rope_config import RopeConfig, read_rope, rope_fields

ARCHITECTURES = (
    "NewModel",
    "NewForSequenceClassification",
    "GteModel",
    "GteForSequenceClassification",
)
NAMES = EncoderNames(
    prefix="new.",
    query_key_value=("attention.qkv_proj", "attention.qkv_proj", "attention.qkv_proj"),
    output="attention.o_proj",
    attention_norm="attn_ln",
    inner=("mlp.up_gate_proj",) * 2,
    down="mlp.down_proj",
    mlp_norm="mlp_ln",
)


def parse_config(fields: Fields, architecture: str) -> ModelConfig:
    """Read the configuration of a GTE."""
    check_absolute_positions(fields, ("rope",))
    if fields.values.get("layer_norm_type", "layer_norm") != "layer_norm":
        raise fields.error("layer_norm_type", "must be layer_norm")
    if fields.flag("logn_attention_scale"):
        raise fields.error("logn_attention_scale", "must be false: scores are not scaled by the length")
    names = replace(NAMES, prefix="gte.") if architecture.startswith("Gte") else NAMES
    head = None
    if is_classifier(architecture):
        head = HeadConfig(dense=f"{names.prefix}pooler.dense")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    types = fields.values.get("type_vocab_size", 1)
    return encoder_config(
        fields,
        architecture,
        EncoderConfig(
            names=names,
            token_types=fields.integer("type_vocab_size") if types else 0,
            inner_bias=False,
            up_first=True,
            head=head,
        ),
        hidden=hidden,
        heads=heads,
        layers=read_layer_count(fields),
        intermediate=fields.integer("intermediate_size"),
        prompt_tokens=fields.integer("max_position_embeddings", 8192),
        norm_epsilon=fields.number("layer_norm_eps", 1e-12),
        activation=read_encoder_activation(fields, "hidden_act"),
        ropes=(read_gte_rope(fields, hidden // heads),),
    )


def read_gte_rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Read the rotary embedding; of its extensions, "ntk" is that of the checkpoints' own code.

    It multiplies the base by the factor f, and divides all frequencies by f ** (2 / head_dim), whatever the
    length of the prompt.

    Raises:
        ConfigError: a field is missing, invalid or not supported.
    """
    rope = rope_fields(fields)
    if rope.values.get("rope_type", rope.values.get("type")) != "ntk":
        return read_rope(fields, head_dim, theta=160000.0)
    if rope.values.get("mixed_b") is not None:
        raise rope.error("mixed_b", "must be null")
    factor = rope.number("factor")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    common = RopeConfig(theta=theta * factor)
    return replace(common, kind="linear", factor=factor ** (2 / head_dim))
