# SPDX-License-Identifier: Apache-2.0
"""From pixels to patches: normalisation and the order of patches.

The arithmetic is that of the image processors of Transformers, in float32.
"""

from __future__ import annotations

import torch

from mizzen.models.vision.config import Normalisation, VisionConfig


def normalise_pixels(pixels: torch.Tensor, normalisation: Normalisation) -> torch.Tensor:
    """Normalise 8-bit pixels.

    Like the processors of Transformers that use Pillow, it rescales in float64 and rounds once.

    Args:
        pixels: Pixels, uint8 [..., 3].
        normalisation: Factor of all pixels, and mean and standard deviation of each channel.

    Returns:
        The normalised pixels, float32 [..., 3].
    """
    mean, std = (
        torch.tensor(values, dtype=torch.float32, device=pixels.device)
        for values in (normalisation.mean, normalisation.std)
    )
    return pixels.double().mul_(normalisation.rescale).float().sub_(mean).div_(std)


def cut_patches(pixels: torch.Tensor, config: VisionConfig) -> torch.Tensor:
    """Cut images into patches, in the order of the tower.

    Blocks of `merge` x `merge` patches follow each other in rows; within a block, its rows follow each other.

    Args:
        pixels: Normalised pixels [tiles, height, width, 3].
        config: Architecture of the encoder.

    Returns:
        Pixels of each patch [tiles * patches, 3 * frames * patch_size * patch_size], in the order of the
        weights: channel, frame, row, column.
    """
    tiles, height, width, channels = pixels.shape
    merge, size, frames = config.merge, config.patch_size, config.frames
    blocks = pixels.view(
        tiles, height // (merge * size), merge, size, width // (merge * size), merge, size, channels
    )
    # [tiles, block rows, block columns, rows and columns in the block, channels, rows, columns of a patch]
    patches = blocks.permute(0, 1, 4, 2, 5, 7, 3, 6)
    repeated = patches.unsqueeze(6).expand(*patches.shape[:6], frames, size, size)
    return repeated.reshape(-1, channels * frames * size * size)


def patch_positions(rows: int, columns: int, merge: int, device: torch.device) -> torch.Tensor:
    """Return row and column of each patch of an image in the order of `cut_patches`, int64 [patches, 2].

    Args:
        rows: Number of rows of patches, a multiple of `merge`.
        columns: Number of columns of patches, a multiple of `merge`.
        merge: Height and width of a block in patches.
        device: Device of the result.
    """
    grid = torch.stack(
        torch.meshgrid(
            torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij"
        ),
        dim=-1,
    )
    blocks = grid.view(rows // merge, merge, columns // merge, merge, 2)
    return blocks.transpose(1, 2).reshape(-1, 2)
