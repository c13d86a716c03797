# SPDX-License-Identifier: Apache-2.0
"""Counts an encoder's parameters from its configuration. Importing this module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mizzen.models.encoders.description import EncoderConfig

if TYPE_CHECKING:
    from mizzen.models.config import ModelConfig


def count_encoder_parameters(config: ModelConfig, encoder: EncoderConfig) -> int:
    """Return the number of parameters of an encoder that are loaded."""
    hidden, size = config.hidden_size, config.heads * config.head_dim
    norm = hidden * (1 + encoder.norm_bias)
    inner = len(encoder.names.inner) * config.intermediate_size
    layer = 3 * size * (hidden + config.qkv_bias) + hidden * (size + config.output_bias)
    layer += inner * (hidden + encoder.inner_bias) + hidden * (config.intermediate_size + config.mlp_bias)
    norms = 2 * config.layers - encoder.norm_first + 1 + bool(encoder.names.final_norm)
    tables = config.vocab_size + encoder.positions + encoder.token_types
    return hidden * tables + config.layers * layer + norms * norm + count_head(config, encoder)


def count_head(config: ModelConfig, encoder: EncoderConfig) -> int:
    """Return the number of parameters of the classification head; 0 without one."""
    head, hidden = encoder.head, config.hidden_size
    if head is None:
        return 0
    norm = hidden * (1 + encoder.norm_bias) if head.norm else 0
    return hidden * (hidden + head.dense_bias) + norm + len(config.labels) * (hidden + 1)
