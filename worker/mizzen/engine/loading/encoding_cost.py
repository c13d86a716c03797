# SPDX-License-Identifier: Apache-2.0
"""Estimates how long encoding an image takes, compared with prompt tokens."""

from __future__ import annotations

import math

from mizzen.core.images.cost import EncodingCost
from mizzen.engine.config import EngineOptions
from mizzen.engine.execution.prefill_graphs import LAYER_LAUNCH_SECONDS, PREFILL_FLOPS
from mizzen.models.config import ModelConfig
from mizzen.models.vision.config import VisionConfig
from mizzen.models.vision.operations import count_encoding_operations

ATTENTION_SLOWDOWN = 2.0
"""Time of an operation of a tower's attention, compared with one of its linear layers.

On an H100, attention ran at 195 to 433 TFLOP/s, and linear layers at 679 to 706 TFLOP/s (1 megapixel)."""

LAUNCH_SHARE = 1 / 8
"""Maximum share of the largest step's prompt tokens that the launches of an encoding count as. Prompts of
small models are also bound by launches, so a comparison of operations overestimates encodings."""


def estimate_encoding_cost(options: EngineOptions, config: ModelConfig, vision: VisionConfig) -> EncodingCost:
    """Estimate the time of encodings in prompt tokens, from the floating-point operations of both.

    Rank 0 encodes alone, whereas all ranks share the work of prompts. The host launches the kernels of an
    encoding one by one, which a GPU may have to wait for.

    Args:
        options: Engine options.
        config: Configuration of the decoder.
        vision: Architecture of the encoder.
    """
    token = 2 * config.layers * config.layer_weights / options.tensor
    block = vision.merge**2
    linear = count_encoding_operations(vision, 1, block).gemms / block
    pair = ATTENTION_SLOWDOWN * 4 * vision.hidden_size
    full = len(vision.full_layers) if vision.window else vision.layers
    windowed = (vision.layers - full) * (vision.window * vision.merge) ** 2
    launches = vision.layers * LAYER_LAUNCH_SECONDS * PREFILL_FLOPS / token
    least = min(math.ceil(launches), int(LAUNCH_SHARE * options.prefill_chunk_tokens))
    return EncodingCost(
        patch_size=vision.patch_size,
        patch_tokens=(linear + pair * windowed) / token,
        pair_tokens=pair * full / token,
        least=least if options.device == "cuda" else 0,
        full_layers=tuple(not vision.window or layer in vision.full_layers for layer in range(vision.layers)),
    )
