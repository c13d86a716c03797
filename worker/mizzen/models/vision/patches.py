# SPDX-License-Identifier: Apache-2.0
"""From pixels to patches: normalisation and the order of patches.

The arithmetic is that of the image processors of Transformers, in float32.
"""

from __future__ import annotations

import torch

from mizzen.models.vision.config import Normalisation, VisionConfig


class PixelNormaliser:
    """Normalises 8-bit pixels as the processors of Transformers that use Pillow do.

    It rescales in float64 and rounds once.
    """

    def __init__(self, normalisation: Normalisation, device: torch.device) -> None:
        self.rescale = normalisation.rescale
        self.mean, self.std = (
            torch.tensor(values, dtype=torch.float32, device=device)
            for values in (normalisation.mean, normalisation.std)
        )

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return pixels (uint8 [..., 3]) normalised, float32 [..., 3]."""
        return pixels.double().mul_(self.rescale).float().sub_(self.mean).div_(self.std)


def cut_patches(pixels: torch.Tensor, config: VisionConfig) -> torch.Tensor:
    """Cut images into patches, in the order of the tower.

    Blocks of `merge` x `merge` patches follow each other in rows; within a block, its rows follow each other.

    Args:
        pixels: Normalised pixels [tiles, height, width, 3], in any dtype.
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
