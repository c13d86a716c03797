# SPDX-License-Identifier: Apache-2.0
"""gpt-oss (arXiv 2508.10925): experts with biases and a clamped gate, attention sinks and windows."""

from __future__ import annotations

from dataclasses import replace

from mizzen.models.block import Activation, BlockConfig
from mizzen.models.config import ModelConfig, read_decoder_config, set_layer_types
from mizzen.models.experts_config import ExpertLayout, ExpertNames, ExpertsConfig, check_experts
from mizzen.models.hf_fields import Fields

ARCHITECTURE = "GptOssForCausalLM"


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a gpt-oss model.

    Without `layer_types`, every second layer has full attention, and the others have a sliding window.
    """
    fields = set_layer_types(
        Fields({"head_dim": 64, "sliding_window": 128, **fields.values}, fields.source), 2
    )
    config = read_decoder_config(
        fields,
        ARCHITECTURE,
        attention_bias=fields.flag("attention_bias", True),
        context_length=131072,
        norm_epsilon=fields.number("rms_norm_eps", 1e-5),
    )
    block = BlockConfig(
        attention_sinks=True,
        activation=Activation.CLAMPED_SWIGLU,
        gate_limit=fields.number("swiglu_limit", 7.0),
        gate_slope=fields.number("swiglu_alpha", 1.702),
    )
    return replace(config, block=block, experts=read_experts(fields, config.layers))


def read_experts(fields: Fields, layers: int) -> ExpertsConfig:
    """Read the fields of the experts, which all layers have.

    Raises:
        ConfigError: a field is missing, invalid or not supported; the message names the field.
    """
    count = fields.first_set(("num_local_experts", "num_experts"))
    experts = ExpertsConfig(
        count=fields.integer(count),
        per_token=fields.integer(fields.first_set(("num_experts_per_tok", "experts_per_token"))),
        width=fields.integer("intermediate_size"),
        width_field="intermediate_size",
        layers=(True,) * layers,
        router_bias=True,
        biases=True,
        names=ExpertNames(router="router"),
        layout=ExpertLayout.TRANSPOSED,
        interleaved=True,
    )
    return check_experts(fields, experts, count=count)
