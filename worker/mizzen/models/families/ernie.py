# SPDX-License-Identifier: Apache-2.0
"""ERNIE 4.5 (Baidu): Llama with an interleaved rotary embedding and optional biases, or with experts."""

from __future__ import annotations

from dataclasses import replace

from mizzen.models.config import ModelConfig, read_decoder_config, read_heads
from mizzen.models.experts_config import ExpertNames, ExpertsConfig, check_experts, read_amount
from mizzen.models.hf_fields import Fields
from mizzen.models.rope_config import read_rope

ARCHITECTURE = "Ernie4_5ForCausalLM"
OLD_ARCHITECTURE = "Ernie4_5_ForCausalLM"
"""Name of the class before Transformers contained it, which older checkpoints list."""

MOE = "Ernie4_5_MoeForCausalLM"
NAMES = ExpertNames(correction_bias="moe_statics.e_score_correction_bias")


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of an ERNIE 4.5 model; the default head dim is 128."""
    fields = Fields({"head_dim": 128, "num_key_value_heads": 2, **fields.values}, fields.source)
    bias = fields.flag("use_bias")
    return read_decoder_config(
        fields,
        ARCHITECTURE,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        context_length=131072,
        tie_embeddings=True,
        norm_epsilon=fields.number("rms_norm_eps", 1e-5),
        ropes=(read_rope(fields, read_heads(fields)[2], theta=500_000.0, interleaved=True),),
    )


def parse_moe(fields: Fields) -> ModelConfig:
    """Read the config.json of an ERNIE 4.5 model with experts, such as ERNIE-4.5-21B-A3B.

    Its layers for multi-token prediction are not loaded.

    Raises:
        ConfigError: a field is missing, invalid or not supported; the message names the field.
    """
    if fields.flag("use_bias"):
        raise fields.error("use_bias", "must be false: biases of experts are not supported")
    config = read_decoder_config(
        fields,
        MOE,
        context_length=131072,
        tie_embeddings=True,
        norm_epsilon=fields.number("rms_norm_eps", 1e-5),
        ropes=(read_rope(fields, read_heads(fields)[2], theta=500_000.0, interleaved=True),),
    )
    count = fields.first_set(("moe_num_experts", "num_experts"))
    width = fields.integer("moe_intermediate_size")
    experts = ExpertsConfig(
        count=fields.integer(count),
        per_token=fields.integer(fields.first_set(("moe_k", "num_experts_per_tok"))),
        width=width,
        layers=read_ernie_layers(fields, config.layers),
        correction_bias=True,
        correction_shape=(1,),
        sum_floor=fields.number("moe_norm_min", 1e-12),
        float32_router=True,
        shared_width=width * read_amount(fields, "moe_num_shared_experts", 2),
        names=NAMES,
    )
    experts = check_experts(fields, experts, count=count)
    return replace(config, experts=experts, ignored_tensors=(r"(^|\.)mtp_",))


def read_ernie_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return which layers have experts: every `moe_layer_interval`-th of a range of layers.

    Raises:
        ConfigError: a field is invalid.
    """
    start, step = read_amount(fields, "moe_layer_start_index", 1), fields.integer("moe_layer_interval", 1)
    end = layers - 1
    if fields.values.get("moe_layer_end_index") not in (None, -1):
        end = read_amount(fields, "moe_layer_end_index")
    return tuple(start <= layer <= end and (layer + 1) % step == 0 for layer in range(layers))
