# SPDX-License-Identifier: Apache-2.0
"""Projectors from the features of a tower to embeddings, and the order of LLaVA-NeXT's tiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from mizzen.layers.activation import ActivationFunction
from mizzen.layers.context import BuildContext
from mizzen.layers.linear import RowParallelLinear
from mizzen.layers.norm import make_norm
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.block import NormKind
from mizzen.models.vision.block import merged_linear
from mizzen.models.vision.config import ProjectorConfig, VisionConfig


class Projector:
    """An MLP that maps blocks of patches to embeddings; see `ProjectorConfig`."""

    def __init__(self, build: BuildContext, config: VisionConfig, projector: ProjectorConfig) -> None:
        self.features = projector.features
        self.norm_after_merge = projector.norm_after_merge
        self.block = config.merge**2
        patch = config.hidden_size * len(projector.features)
        columns = patch * self.block
        self.norm = self.merging = None
        if projector.norm:
            self.norm = make_norm(
                build,
                projector.norm,
                columns if projector.norm_after_merge else patch,
                projector.norm_epsilon,
                projector.norm_kind,
                bias=projector.norm_kind is NormKind.LAYER,
            )
        if projector.merging:
            self.merging = RowParallelLinear(build, projector.merging, patch, columns, False)
            columns = patch
        self.first = merged_linear(build, [projector.first], projector.inner_size, columns, projector.bias)
        self.activation = ActivationFunction(build, projector.activation)
        self.second = RowParallelLinear(
            build, projector.second, config.output_size, projector.inner_size, projector.bias
        )

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        for part in (self.norm, self.merging, self.first, self.second):
            if part is not None:
                yield from part.targets()

    def __call__(self, states: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Project hidden states of the tower.

        Args:
            states: Hidden states [patches, hidden] by index; the patches of a block follow each other.

        Returns:
            One embedding for each block of patches [blocks, output].
        """
        parts = [states[index] for index in self.features]
        x = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if self.norm is not None and not self.norm_after_merge:
            x = self.norm(x)
        if self.merging is not None:
            # The weights belong to the elements of a block in the order element, patch.
            x = x.view(-1, self.block, x.shape[-1]).transpose(1, 2).flatten(1)
            x = self.merging(x)
        else:
            x = x.reshape(-1, self.block * x.shape[-1])
        if self.norm is not None and self.norm_after_merge:
            x = self.norm(x)
        return self.second(self.activation(self.first(x)))


def join_tiles(
    embeddings: torch.Tensor, newline: torch.Tensor, side: int, grid: tuple[int, int, int]
) -> torch.Tensor:
    """Put the tiles of an image together, without padding, as LLaVA-NeXT does.

    The first tile shows the whole image, and its embeddings come first. The other tiles form a larger image,
    from which padding is removed, and each of its rows ends with `newline`.

    Args:
        embeddings: Embeddings of all tiles [tiles * side * side, hidden].
        newline: Embedding of the end of a row [hidden].
        side: Number of rows and of columns of embeddings in a tile.
        grid: Number of rows of tiles, and numbers of rows and columns of embeddings that remain without
            padding, which lies equally on two opposite sides.

    Returns:
        Embeddings [side * side + rows * (columns + 1), hidden].
    """
    tile_rows, rows, columns = grid
    tiles = embeddings.view(-1, side, side, embeddings.shape[-1])
    whole, others = tiles[0].flatten(0, 1), tiles[1:]
    picture = others.view(tile_rows, -1, side, side, others.shape[-1]).transpose(1, 2)
    picture = picture.reshape(tile_rows * side, -1, others.shape[-1])
    top, left = (picture.shape[0] - rows) // 2, (picture.shape[1] - columns) // 2
    picture = picture[top : top + rows, left : left + columns]
    ends = newline.to(picture.dtype).expand(rows, 1, -1)
    return torch.cat((whole, torch.cat((picture, ends), dim=1).flatten(0, 1)))
