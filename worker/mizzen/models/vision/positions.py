# SPDX-License-Identifier: Apache-2.0
"""Positions of patches: rotary embeddings of rows and columns, and learned positions."""

from __future__ import annotations

from math import isqrt

import torch

from mizzen.models.vision.config import VisionConfig

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of rotations, float32 [patches, 1, head_dim / 2]."""


def axis_frequencies(config: VisionConfig, theta: float, device: torch.device) -> torch.Tensor:
    """Return rotations in radians per row and per column, float32 [2, head_dim / 4].

    A head of a tower is rotated by rows in one half of its frequencies, and by columns in the other.
    """
    size = config.head_dim if config.rope_alternates else config.head_dim // 2
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    inverse = 1.0 / theta**exponents
    return inverse.view(-1, 2).t() if config.rope_alternates else inverse.expand(2, -1)


def rotation_angles(config: VisionConfig, positions: torch.Tensor) -> Angles | None:
    """Return the angles of patches at `positions` (row and column, int64 [patches, 2]); None without RoPE."""
    if config.rope_theta is None:
        return None
    frequencies = axis_frequencies(config, config.rope_theta, positions.device)
    angles = (positions.float()[:, :, None] * frequencies).flatten(1)[:, None]
    return angles.cos(), angles.sin()


def interpolate_positions(
    table: torch.Tensor, positions: torch.Tensor, extents: torch.Tensor
) -> torch.Tensor:
    """Interpolate learned positions of a square image bilinearly, so that its corners are those of an image.

    Args:
        table: Learned positions [side * side, hidden].
        positions: Row and column of each patch in its image, int64 [patches, 2].
        extents: Greatest row and column of the image of each patch, int64 [patches, 2].

    Returns:
        The position of each patch [patches, hidden], in the dtype of the table.
    """
    side = isqrt(len(table))
    place = positions.float() * (side - 1) / extents.clamp(min=1)
    low = place.floor().long()
    weight = place - low
    high = (low + 1).clamp(max=side - 1)
    total = torch.zeros(len(positions), table.shape[1], dtype=torch.float32, device=table.device)
    for row, row_weight in ((low[:, 0], 1 - weight[:, 0]), (high[:, 0], weight[:, 0])):
        for column, column_weight in ((low[:, 1], 1 - weight[:, 1]), (high[:, 1], weight[:, 1])):
            total += table[row * side + column] * (row_weight * column_weight)[:, None]
    return total.to(table.dtype)
