# SPDX-License-Identifier: Apache-2.0
"""ERNIE 4.5 without experts (Baidu): Llama with an interleaved rotary embedding and optional biases."""

from __future__ import annotations

from mizzen.models.config import ModelConfig, read_decoder_config, read_heads
from mizzen.models.hf_fields import Fields
from mizzen.models.rope_config import read_rope

ARCHITECTURE = "Ernie4_5ForCausalLM"
OLD_ARCHITECTURE = "Ernie4_5_ForCausalLM"
"""Name of the class before Transformers contained it, which older checkpoints list."""


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
