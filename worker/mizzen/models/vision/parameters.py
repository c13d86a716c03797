# SPDX-License-Identifier: Apache-2.0
"""Counts a vision encoder's parameters from its configuration, without torch."""

from __future__ import annotations

from mizzen.models.block import NormKind
from mizzen.models.vision.config import CHANNELS, ProjectorConfig, VisionConfig


def count_vision_parameters(config: VisionConfig) -> int:
    """Return the number of parameters of a vision encoder that are loaded."""
    hidden, inner = config.hidden_size, config.intermediate_size
    norm = hidden * (1 + (config.norm is NormKind.LAYER))
    inputs = len(config.names.inner)
    layer = 3 * hidden * (hidden + config.qkv_bias) + hidden * (hidden + config.output_bias)
    layer += inputs * inner * (hidden + config.mlp_bias) + hidden * (inner + config.mlp_bias) + 2 * norm
    patch = CHANNELS * config.frames * config.patch_size**2
    embedding = hidden * (patch + config.patch_bias + config.class_token)
    embedding += hidden * (config.positions + (config.class_token if config.positions else 0))
    embedding += norm if config.names.first_norm else 0
    projectors = sum(count_projector(config, projector) for projector in config.projectors)
    newline = config.output_size if config.newline else 0
    return embedding + config.layers * layer + projectors + newline


def count_projector(config: VisionConfig, projector: ProjectorConfig) -> int:
    """Return the number of parameters of one projector."""
    patch = config.hidden_size * len(projector.features)
    columns = patch * config.merge**2
    total = 0
    if projector.norm:
        size = columns if projector.norm_after_merge else patch
        total += size * (1 + (projector.norm_kind is NormKind.LAYER))
    if projector.merging:
        total += patch * columns
        columns = patch
    total += projector.inner_size * (columns + projector.bias)
    return total + config.output_size * (projector.inner_size + projector.bias)
