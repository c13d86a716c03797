# SPDX-License-Identifier: Apache-2.0
"""Granite 3 and 4 (IBM): Llama with multipliers of embeddings, outputs, scores and logits.

Granite 3 may have experts in all layers; of Granite 4, only models without experts are read.
"""

from __future__ import annotations

from dataclasses import replace

from mizzen.models.block import BlockConfig, TensorNames
from mizzen.models.config import ModelConfig, read_decoder_config, read_heads
from mizzen.models.experts_config import ExpertNames, ExpertsConfig, check_experts
from mizzen.models.hf_fields import Fields, show_value
from mizzen.models.rope_config import RopeConfig, read_rope

GRANITE = "GraniteForCausalLM"
GRANITE_HYBRID = "GraniteMoeHybridForCausalLM"
GRANITE_MOE = "GraniteMoeForCausalLM"
MOE_NAMES = ExpertNames(
    block="block_sparse_moe",
    router="router.layer",
    stacked_gate_up="input_linear.weight",
    stacked_down="output_linear.weight",
)
HYBRID_NAMES = TensorNames(mlp="shared_mlp", gate_up=("input_linear", "input_linear"), down="output_linear")
ATTENTION = ("attention", "full_attention")
"""Entries of `layer_types` for layers with attention."""
USE_DENSE = "use a dense model, such as granite-4.0-micro"


def parse_granite(fields: Fields) -> ModelConfig:
    """Read the config.json of a Granite 3 model."""
    return read_granite(fields, GRANITE, TensorNames(), (read_rope(fields, read_heads(fields)[2]),))


def parse_moe(fields: Fields) -> ModelConfig:
    """Read the config.json of a Granite 3 model with experts, such as granite-3.1-3b-a800m-instruct."""
    ropes = (read_rope(fields, read_heads(fields)[2]),)
    config = read_granite(fields, GRANITE_MOE, TensorNames(), ropes)
    experts = ExpertsConfig(
        count=fields.integer("num_local_experts", 8),
        per_token=fields.integer("num_experts_per_tok", 2),
        width=config.intermediate_size,
        width_field="intermediate_size",
        layers=(True,) * config.layers,
        names=MOE_NAMES,
    )
    return replace(config, mlp_bias=False, experts=check_experts(fields, experts, count="num_local_experts"))


def parse_hybrid(fields: Fields) -> ModelConfig:
    """Read the config.json of a Granite 4 model whose layers all have attention and no experts.

    The feed-forward block is the expert that all tokens share.

    Raises:
        ConfigError: a field is missing, invalid or not supported; the message names the field.
    """
    check_attention_only(fields)
    ropes = (read_hybrid_rope(fields),)
    width = fields.integer("shared_intermediate_size", 1024)
    fields = Fields(
        {**fields.values, "layer_types": None, "mlp_bias": None, "intermediate_size": width}, fields.source
    )
    return read_granite(fields, GRANITE_HYBRID, HYBRID_NAMES, ropes)


def check_attention_only(fields: Fields) -> None:
    """Check that all layers have attention and no experts.

    Raises:
        ConfigError: some layers are recurrent, as all are if config.json lists none, or have experts.
    """
    name = fields.first_set(("layer_types", "layers_block_type"))
    kinds, layers = fields.values.get(name), fields.integer("num_hidden_layers")
    if kinds is None:
        raise fields.unsupported(
            name,
            f"is missing, so that all layers have a recurrent state, which is not supported: {USE_DENSE}",
        )
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.error(name, f"must list {layers} layers")
    others = sorted({str(kind) for kind in kinds if kind not in ATTENTION})
    if others:
        raise fields.unsupported(
            name,
            f"describes layers with a recurrent state instead of attention ({', '.join(others)}), which are "
            f"not supported: {USE_DENSE}",
        )
    experts = fields.values.get("num_local_experts")
    if experts is None:
        raise fields.unsupported(
            "num_local_experts",
            f"is not set, which means 8: mixtures of experts are not supported; {USE_DENSE}",
        )
    if isinstance(experts, bool) or experts != 0:
        raise fields.unsupported(
            "num_local_experts",
            f"is {show_value(experts)}: mixtures of experts are not supported; {USE_DENSE}",
        )


def read_hybrid_rope(fields: Fields) -> RopeConfig:
    """Read the rotary embedding of all layers, which have none unless `position_embedding_type` is "rope".

    Raises:
        ConfigError: a field is missing, invalid or not supported; the message names the field.
    """
    kind = fields.values.get("position_embedding_type")
    if kind == "rope":
        return read_rope(fields, read_heads(fields)[2])
    if kind not in (None, "nope"):
        raise fields.error("position_embedding_type", "must be rope, nope or null")
    return RopeConfig(kind="none")


def read_granite(
    fields: Fields, architecture: str, names: TensorNames, ropes: tuple[RopeConfig, ...]
) -> ModelConfig:
    """Read the fields that both architectures share.

    Raises:
        ConfigError: a field is missing, invalid or not supported; the message names the field.
    """
    block = BlockConfig(
        attention_scale=fields.number("attention_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        names=names,
    )
    config = read_decoder_config(
        fields,
        architecture,
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        block=block,
        ropes=ropes,
    )
    return replace(
        config,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logits_multiplier=1 / fields.number("logits_scaling", 1.0),
    )
