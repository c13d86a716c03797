# SPDX-License-Identifier: Apache-2.0
"""ModernBERT (arXiv 2412.13663): rotary embeddings, and local attention in most layers."""

from __future__ import annotations

from mizzen.models.config import ModelConfig, read_layer_count
from mizzen.models.encoders.config import encoder_config, is_classifier, read_encoder_activation
from mizzen.models.encoders.description import EncoderConfig, EncoderNames, HeadConfig
from mizzen.models.hf_fields import Fields
from mizzen.models.rope_config import RopeConfig, read_ropes_by_layer_type

ARCHITECTURES = ("ModernBertModel", "ModernBertForSequenceClassification")
NAMES = EncoderNames(
    prefix="model.",
    embedding="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    layer="layers",
    query_key_value=("attn.Wqkv", "attn.Wqkv", "attn.Wqkv"),
    output="attn.Wo",
    attention_norm="attn_norm",
    inner=("mlp.Wi",) * 2,
    down="mlp.Wo",
    mlp_norm="mlp_norm",
    final_norm="final_norm",
)
FULL, SLIDING = "full_attention", "sliding_attention"


def parse_config(fields: Fields, architecture: str) -> ModelConfig:
    """Read the configuration of a ModernBERT."""
    layers = read_layer_count(fields)
    attention_bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    windows = read_local_windows(fields, layers)
    return encoder_config(
        fields,
        architecture,
        EncoderConfig(
            names=NAMES,
            norm_first=True,
            norm_bias=fields.flag("norm_bias"),
            inner_bias=mlp_bias,
            head=read_head(fields) if is_classifier(architecture) else None,
        ),
        hidden=hidden,
        heads=heads,
        layers=layers,
        intermediate=fields.integer("intermediate_size"),
        prompt_tokens=fields.integer("max_position_embeddings", 8192),
        norm_epsilon=fields.number("norm_eps", 1e-5),
        activation=read_encoder_activation(fields, "hidden_activation"),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=mlp_bias,
        ropes=read_ropes(fields, hidden // heads),
        rope_by_layer=tuple(int(window is not None) for window in windows),
        windows=windows,
    )


def read_local_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Read how many tokens to each side a token attends to, by layer; None for all tokens.

    Without `layer_types`, every layer whose number, counted from 0, is a multiple of
    `global_attn_every_n_layers` has full attention.

    Raises:
        ConfigError: a field is invalid.
    """
    kinds = fields.values.get("layer_types")
    if kinds is None:
        every = fields.integer("global_attn_every_n_layers", 3)
        kinds = [SLIDING if layer % every else FULL for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.error("layer_types", f"must list {layers} layers")
    if any(kind not in (FULL, SLIDING) for kind in kinds):
        raise fields.error("layer_types", f"may contain only {FULL} and {SLIDING}")
    window = fields.integer("local_attention", 128) // 2
    return tuple(window if kind == SLIDING else None for kind in kinds)


def read_ropes(fields: Fields, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Read the rotary embeddings of layers with full and with local attention, in this order.

    Raises:
        ConfigError: a field is invalid or not supported.
    """
    full = fields.number("global_rope_theta", 160000.0)
    local = fields.optional_number("local_rope_theta", 10000.0) or full
    ropes = read_ropes_by_layer_type(fields, head_dim, full_theta=full, sliding_theta=local)
    if ropes is not None:
        return ropes
    if fields.values.get("rope_scaling") is not None:
        raise fields.error("rope_scaling", "must be null: ModernBERT's rotary embedding is not extended")
    return RopeConfig(theta=full), RopeConfig(theta=local)


def read_head(fields: Fields) -> HeadConfig:
    """Read the classification head.

    Raises:
        ConfigError: a field is invalid or not supported.
    """
    pooling = fields.values.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise fields.error("classifier_pooling", "must be cls or mean")
    return HeadConfig(
        dense="head.dense",
        norm="head.norm",
        dense_bias=fields.flag("classifier_bias"),
        mean=pooling == "mean",
        activation=read_encoder_activation(fields, "classifier_activation"),
    )
