# SPDX-License-Identifier: Apache-2.0
"""Nomic BERT (arXiv 2402.01613): a BERT with rotary embeddings, gated blocks and few biases."""

from __future__ import annotations

from mizzen.models.block import Activation
from mizzen.models.config import ModelConfig, read_layer_count
from mizzen.models.encoders.config import encoder_config
from mizzen.models.encoders.description import EncoderConfig, EncoderNames
from mizzen.models.hf_fields import Fields
from mizzen.models.rope_config import RopeConfig

ARCHITECTURES = ("NomicBertModel",)
NAMES = EncoderNames(
    prefix="nomic_bert.",
    embedding_norm="emb_ln",
    layer="encoder.layers",
    query_key_value=("attn.Wqkv", "attn.Wqkv", "attn.Wqkv"),
    output="attn.out_proj",
    attention_norm="norm1",
    inner=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
    mlp_norm="norm2",
)
GATE_ACTIVATIONS = {"swiglu": Activation.SILU, "geglu": Activation.GELU}
OFF = {
    "prenorm": "norms follow the blocks",
    "parallel_block": "blocks are not parallel",
    "use_rms_norm": "norms are LayerNorms",
    "rotary_emb_interleaved": "neighbouring elements are not rotated together",
    "causal": "attention sees the whole prompt",
}
"""Fields that must be false, with the reason."""


def parse_config(fields: Fields, architecture: str) -> ModelConfig:
    """Read the configuration of a Nomic BERT, whose fields have the names of GPT-2."""
    for name, reason in OFF.items():
        if fields.flag(name):
            raise fields.error(name, f"must be false: {reason}")
    if fields.values.get("num_experts") and fields.values.get("moe_every_n_layers", 1):
        raise fields.error("num_experts", "must be 0: encoders with mixtures of experts are not supported")
    if fields.number("rotary_emb_fraction", 1.0) != 1:
        raise fields.error("rotary_emb_fraction", "must be 1: whole heads are rotated")
    if fields.values.get("rotary_emb_scale_base") is not None:
        raise fields.error("rotary_emb_scale_base", "must be null")
    gate = fields.values.get("activation_function", "swiglu")
    if not isinstance(gate, str) or gate not in GATE_ACTIVATIONS:
        raise fields.error("activation_function", f"must be one of {', '.join(GATE_ACTIVATIONS)}")
    prompt_tokens = fields.integer("n_positions", 8192)
    if fields.values.get("rotary_scaling_factor") is not None:
        # The base of the rotary embedding depends on the length of longer prompts.
        prompt_tokens = min(prompt_tokens, fields.integer("max_trained_positions", 2048))
    hidden = fields.integer("n_embd")
    attention_bias = fields.flag("qkv_proj_bias", True)
    return encoder_config(
        fields,
        architecture,
        EncoderConfig(
            names=NAMES,
            token_types=fields.integer("type_vocab_size", 2)
            if fields.values.get("type_vocab_size", 2)
            else 0,
            inner_bias=fields.flag("mlp_fc1_bias", True),
        ),
        hidden=hidden,
        heads=fields.integer("n_head"),
        layers=read_layer_count(fields, "n_layer"),
        intermediate=fields.integer("n_inner", 4 * hidden),
        prompt_tokens=prompt_tokens,
        norm_epsilon=fields.number("layer_norm_epsilon", 1e-12),
        activation=GATE_ACTIVATIONS[gate],
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_fc2_bias", True),
        ropes=(RopeConfig(theta=fields.number("rotary_emb_base", 10000.0)),),
    )
