# SPDX-License-Identifier: Apache-2.0
"""Embeddings of patches: the input of a vision tower's first layer."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from mizzen.layers.context import BuildContext
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.vision.block import make_tower_norm
from mizzen.models.vision.config import CHANNELS, VisionConfig
from mizzen.models.vision.layout import EncodingLayout
from mizzen.models.vision.positions import interpolate_positions


class TowerTensor:
    """A tensor of a checkpoint that is used as it is."""

    def __init__(self, build: BuildContext, name: str, *shape: int) -> None:
        self.name = name
        self.value = build.allocate(*shape)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destination of the checkpoint's tensor."""
        shape = tuple(self.value.shape)
        columns = self.value[0].numel() if self.value.dim() > 1 else len(self.value)

        def fill(weight: torch.Tensor, generator: torch.Generator) -> None:
            weight.normal_(0, 1 / math.sqrt(columns), generator=generator)

        yield WeightTarget(
            name=self.name,
            shape=shape,
            shard=tuple(slice(0, size) for size in shape),
            destination=self.value,
            fill=fill,
        )


class PatchEmbedding:
    """Linear embedding of patches, learned positions, a class token and a norm, as the tower has them."""

    def __init__(self, build: BuildContext, config: VisionConfig) -> None:
        names, hidden, size = config.names, config.hidden_size, config.patch_size
        name = names.prefix + names.patch_embedding
        frames = (config.frames,) if config.frames > 1 else ()
        self.config = config
        self.weight = TowerTensor(build, f"{name}.weight", hidden, CHANNELS, *frames, size, size)
        self.bias = TowerTensor(build, f"{name}.bias", hidden) if config.patch_bias else None
        self.class_token = self.positions = self.norm = None
        if config.class_token:
            self.class_token = TowerTensor(build, names.prefix + names.class_token, hidden)
        if config.positions:
            rows = config.positions + config.class_token
            self.positions = TowerTensor(build, f"{names.prefix}{names.positions}.weight", rows, hidden)
        if names.first_norm:
            self.norm = make_tower_norm(build, config, names.prefix + names.first_norm)

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        for part in (self.weight, self.bias, self.class_token, self.positions, self.norm):
            if part is not None:
                yield from part.targets()

    def __call__(self, patches: torch.Tensor, layout: EncodingLayout) -> torch.Tensor:
        """Embed the patches of images.

        Args:
            patches: Normalised pixels of the patches [patches, pixels of a patch], in the model's dtype.
            layout: Places of the patches.

        Returns:
            Embeddings [tokens, hidden] in the model's dtype. Each tile's class token precedes its patches.

        Raises:
            ValueError: The tower interpolates learned positions, and the layout lacks their places.
        """
        weight = self.weight.value
        x = F.linear(patches, weight.flatten(1), None if self.bias is None else self.bias.value)
        if self.config.image_size:
            x = self._complete_tiles(x.view(layout.tiles, -1, x.shape[-1]))
        elif self.positions is not None:
            if layout.positions is None or layout.extents is None:
                raise ValueError("learned positions need the positions and extents of the layout")
            x = x + interpolate_positions(self.positions.value, layout.positions, layout.extents)
        return x if self.norm is None else self.norm(x)

    def _complete_tiles(self, x: torch.Tensor) -> torch.Tensor:
        """Add class tokens and positions to tiles of fixed size [tiles, patches, hidden]."""
        if self.class_token is not None:
            x = torch.cat((self.class_token.value.expand(len(x), 1, -1), x), dim=1)
        if self.positions is not None:
            x = x + self.positions.value
        return x.flatten(0, 1)
