# SPDX-License-Identifier: Apache-2.0
"""Refuses quantized weights of models for which the engine cannot load them."""

from __future__ import annotations

from mizzen.models.hf_fields import ConfigError, Fields
from mizzen.quantization.config_fields import USE_ORIGINAL
from mizzen.quantization.reader import MODELOPT_FILE, read_quantization


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
