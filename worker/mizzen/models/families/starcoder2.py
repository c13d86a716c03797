# SPDX-License-Identifier: Apache-2.0
"""StarCoder2 (arXiv 2402.19173): LayerNorm with biases, biases everywhere, and no gate."""

from __future__ import annotations

from mizzen.models.block import BlockConfig, NormKind, TensorNames
from mizzen.models.config import ModelConfig, read_decoder_config
from mizzen.models.hf_fields import Fields

ARCHITECTURE = "Starcoder2ForCausalLM"
BLOCK = BlockConfig(norm=NormKind.LAYER, norm_bias=True, names=TensorNames(gate_up=("c_fc",), down="c_proj"))


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a StarCoder2 model."""
    bias = fields.flag("use_bias", True)
    return read_decoder_config(
        fields,
        ARCHITECTURE,
        window=fields.optional_integer("sliding_window"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        context_length=4096,
        tie_embeddings=True,
        norm_epsilon=fields.number("norm_epsilon", 1e-5),
        activation="gelu_pytorch_tanh",
        block=BLOCK,
    )
