# SPDX-License-Identifier: Apache-2.0
"""Refuses quantized weights of models for which the engine cannot load them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mizzen.models.hf_fields import ConfigError, Fields
from mizzen.quantization.config_fields import USE_ORIGINAL, USE_SERVED
from mizzen.quantization.reader import MODELOPT_FILE, read_quantization
from mizzen.quantization.schemes import MXFP4_BLOCK, Mxfp4Weights

if TYPE_CHECKING:
    from mizzen.models.config import ModelConfig


def check_blocks(config: ModelConfig) -> None:
    """Check that weights in MXFP4 are those of experts whose rows consist of whole blocks.

    Raises:
        ConfigError: They are not, or the architecture is another than that of gpt-oss.
    """
    if not any(isinstance(scheme, Mxfp4Weights) for scheme in config.quantization.schemes):
        return
    experts = config.experts
    if experts is None or not experts.interleaved:
        raise ConfigError(
            f"quantization_config describes quantized weights (MXFP4) of {config.architecture}, which are "
            f"served only for gpt-oss: {USE_SERVED}, in FP8 or in W4A16"
        )
    for name, size in ((experts.width_field, experts.width), ("hidden_size", config.hidden_size)):
        if size % MXFP4_BLOCK:
            raise ConfigError(f"{name} ({size}) must be a multiple of {MXFP4_BLOCK} with MXFP4")


def check_unquantized(fields: Fields) -> None:
    """Check that a checkpoint does not describe quantized weights; an 8-bit KV cache is no such description.

    Raises:
        ConfigError: The weights are quantized; the message names their format.
    """
    quantization = read_quantization(fields)
    if quantization.schemes:
        source = f"{fields.source}: quantization_config"
        if not fields.child("quantization_config").values:
            source = MODELOPT_FILE
        raise ConfigError(
            f"{source} describes quantized weights ({quantization.describe()}), which are served only for "
            f"dense architectures that Mizzen implements itself: {USE_ORIGINAL}"
        )
