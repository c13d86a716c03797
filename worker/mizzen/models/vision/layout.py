# SPDX-License-Identifier: Apache-2.0
"""Places of the patches of several images that a vision encoder computes together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mizzen.attention.base import copy_to_device
from mizzen.attention.segments import Segments
from mizzen.models.vision.config import VisionConfig
from mizzen.models.vision.patches import patch_positions
from mizzen.models.vision.windows import order_by_window

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """Numbers of tiles, and of rows and columns of patches in each."""

    tiles: int
    rows: int
    """Rows of patches in a tile."""
    columns: int
    """Columns of patches in a tile."""

    @property
    def patches(self) -> int:
        """Number of patches of all tiles."""
        return self.tiles * self.rows * self.columns


class EncodingLayout:
    """Layout of images whose tokens follow each other, computed on the host from their grids."""

    def __init__(self, config: VisionConfig, grids: Sequence[PatchGrid], device: torch.device) -> None:
        """Lay out images.

        Args:
            config: Architecture of the encoder.
            grids: Patches of each image.
            device: Device of the encoder; nothing waits for it.

        Raises:
            ValueError: An image has several tiles, and the layers attend within windows.
        """
        self.config, self.grids = config, grids
        self.positions: torch.Tensor | None = None
        """Row and column of each patch in its tile, int64 [patches, 2]; None if the tower does not need
        them."""
        self.extents: torch.Tensor | None = None
        """Greatest row and column of each patch's tile, int64 [patches, 2]; None if positions are not
        interpolated."""
        interpolates = bool(config.positions) and not config.image_size
        if interpolates or config.rope_theta is not None:
            self.positions = copy_to_device(torch.cat([self.tile_positions(grid) for grid in grids]), device)
        if interpolates:
            extents = torch.tensor([(grid.rows - 1, grid.columns - 1) for grid in grids])
            counts = torch.tensor([grid.patches for grid in grids])
            self.extents = copy_to_device(extents.repeat_interleave(counts, dim=0), device)
        self.order: torch.Tensor | None = None
        """Index of the block of patches at each place of the layers, int64 [blocks]; None for the usual
        order."""
        self.windows: Segments = ()
        """Segments of the tokens in the order of `order` within which layers with windows attend."""
        if config.window:
            self._order_by_window(device)

    @property
    def tiles(self) -> int:
        """Number of tiles of all images."""
        return sum(grid.tiles for grid in self.grids)

    @property
    def whole_tiles(self) -> Segments:
        """Segments of the tokens of each tile."""
        class_token = self.config.class_token
        return join_equal_segments(
            [(grid.tiles, grid.rows * grid.columns + class_token) for grid in self.grids]
        )

    @property
    def embeddings(self) -> list[int]:
        """Number of rows that the projectors return for each image."""
        config = self.config
        extra = config.class_token - config.drops_first
        return [grid.tiles * ((grid.rows * grid.columns + extra) // config.merge**2) for grid in self.grids]

    def tile_positions(self, grid: PatchGrid) -> torch.Tensor:
        """Return row and column of each patch of an image on the host, int64 [patches, 2]."""
        return patch_positions(grid.rows, grid.columns, self.config.merge, CPU).repeat(grid.tiles, 1)

    def _order_by_window(self, device: torch.device) -> None:
        config, first = self.config, 0
        orders: list[torch.Tensor] = []
        windows: list[tuple[int, int]] = []
        for grid in self.grids:
            if grid.tiles != 1:
                raise ValueError(f"an image of this model is one tile, not {grid.tiles}")
            rows, columns = grid.rows // config.merge, grid.columns // config.merge
            order, segments = order_by_window(rows, columns, config.window, config.merge, CPU)
            orders.append(order + first)
            windows += segments
            first += len(order)
        self.order, self.windows = copy_to_device(torch.cat(orders), device), join_equal_segments(windows)


def join_equal_segments(segments: Sequence[tuple[int, int]]) -> Segments:
    """Join neighbouring pairs (count, length) of equal length."""
    joined: list[tuple[int, int]] = []
    for count, length in segments:
        if joined and joined[-1][1] == length:
            joined[-1] = joined[-1][0] + count, length
        else:
            joined.append((count, length))
    return tuple(joined)
