# SPDX-License-Identifier: Apache-2.0
"""Counts the floating-point operations of a vision encoder from its configuration, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.models.vision.config import CHANNELS, ProjectorConfig, VisionConfig


@dataclass(frozen=True, slots=True)
class EncodingOperations:
    """Floating-point operations of one image; a multiplication with an addition counts as two."""

    gemms: int
    """Operations of linear layers."""
    attention: int
    """Operations of the products of queries with keys and of weights with values."""

    @property
    def total(self) -> int:
        """All operations."""
        return self.gemms + self.attention


def count_encoding_operations(config: VisionConfig, tiles: int, patches: int) -> EncodingOperations:
    """Return the operations of encoding an image.

    Args:
        config: Architecture of the encoder.
        tiles: Number of tiles of the image.
        patches: Number of patches of a tile.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = 4 * hidden * hidden + (len(config.names.inner) + 1) * hidden * inner
    embedding = hidden * CHANNELS * config.frames * config.patch_size**2
    projection = sum(_projector_weights(config, projector) for projector in config.projectors)
    tokens = tiles * patches
    gemms = 2 * tokens * (config.layers * layer + embedding) + 2 * tokens * projection // config.merge**2
    full = len(config.full_layers) if config.window else config.layers
    seen = min(patches, (config.window * config.merge) ** 2)
    attended = full * patches + (config.layers - full) * seen
    return EncodingOperations(gemms, 4 * tokens * attended * hidden)


def _projector_weights(config: VisionConfig, projector: ProjectorConfig) -> int:
    """Return the number of weights with which the features of a block of patches are multiplied."""
    patch = config.hidden_size * len(projector.features)
    columns, merging = patch * config.merge**2, 0
    if projector.merging:
        merging, columns = patch * columns, patch
    return merging + columns * projector.inner_size + projector.inner_size * config.output_size
