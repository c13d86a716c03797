# SPDX-License-Identifier: Apache-2.0
"""The vision encoder: from the pixels of an image to embeddings that replace tokens of a prompt.

`mizzen.engine` runs it on rank 0 for one image at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from mizzen.attention.segments import Attend, make_segment_attention
from mizzen.layers.context import BuildContext
from mizzen.layers.linear_methods.unquantized import UnquantizedLinear
from mizzen.layers.sharding import Mesh
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.vision.block import VisionBlock
from mizzen.models.vision.config import VisionConfig
from mizzen.models.vision.embedding import PatchEmbedding, TowerTensor
from mizzen.models.vision.patches import PixelNormaliser, cut_patches, patch_positions
from mizzen.models.vision.positions import Angles, rotation_angles
from mizzen.models.vision.projector import Projector, join_tiles
from mizzen.models.vision.windows import order_by_window
from mizzen.parallel.collectives import SINGLE_RANK


class VisionEncoder:
    """A vision tower with its projectors, which one rank holds as a whole."""

    def __init__(self, build: BuildContext, config: VisionConfig) -> None:
        self.config = config
        self.device, self.dtype = build.device, build.dtype
        self.normalise = PixelNormaliser(config.normalisation, build.device)
        self.attention = make_segment_attention(build.device, build.dtype, config.head_dim)
        self.ignored: Sequence[re.Pattern[str]] = [re.compile(name) for name in config.ignored_tensors]
        """Patterns of the names of checkpoint tensors that the encoder does not need."""
        self.embedding = PatchEmbedding(build, config)
        self.blocks = [VisionBlock(build, config, layer) for layer in range(config.layers)]
        self.projectors = [Projector(build, config, projector) for projector in config.projectors]
        self.newline = TowerTensor(build, config.newline, config.output_size) if config.newline else None
        self.features = {index for projector in config.projectors for index in projector.features}

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of all checkpoint tensors."""
        yield from self.embedding.targets()
        for part in (*self.blocks, *self.projectors):
            yield from part.targets()
        if self.newline is not None:
            yield from self.newline.targets()

    def finish(self) -> None:
        """Prepare the loaded weights; must be called once, before the first image."""
        for block in self.blocks:
            block.mlp.finish()

    def __call__(self, pixels: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        """Encode one image, without waiting for the device if the pixels are there.

        Args:
            pixels: Pixels in RGB, uint8 [tiles, height, width, 3], on any device.
            grid: `ImageGeometry.grid` of the image; only models that cut images into tiles need it.

        Returns:
            Embeddings [embeddings, output * (1 + deepstack layers)] in the model's dtype: for each embedding
            that of the prompt, and then the features for the decoder's first layers.

        Raises:
            ValueError: the size of the image does not suit the model.
        """
        self._check_size(pixels)
        config = self.config
        patches = cut_patches(self.normalise(pixels.to(self.device)).to(self.dtype), config)
        tiles, rows, columns = len(pixels), *(size // config.patch_size for size in pixels.shape[1:3])
        positions = patch_positions(rows, columns, config.merge, self.device)
        x = self.embedding(patches, positions, tiles)
        tokens = len(x) // tiles
        angles = rotation_angles(config, positions)
        if angles is not None and tiles > 1:
            angles = angles[0].repeat(tiles, 1, 1), angles[1].repeat(tiles, 1, 1)
        if config.window:
            embeddings = self._encode_in_windows(x, angles, tiles, rows, columns)
        else:
            states = self._run_layers(x, angles, self.attention.plan(((tiles, tokens),)))
            if config.drops_first:
                states = {
                    i: state.view(tiles, tokens, -1)[:, 1:].flatten(0, 1) for i, state in states.items()
                }
            embeddings = self._project(states)
        if self.newline is not None:
            return join_tiles(embeddings, self.newline.value, config.side, grid)
        return embeddings

    def _check_size(self, pixels: torch.Tensor) -> None:
        tiles, height, width, _ = pixels.shape
        size, unit = self.config.image_size, self.config.unit
        if size and (height, width) != (size, size):
            raise ValueError(f"the model's images have {size} x {size} pixels, not {width} x {height}")
        if not size and (height % unit or width % unit or not height or not width):
            raise ValueError(f"{width} x {height} pixels are no multiples of {unit}")
        if not tiles or (self.newline is not None and tiles < 2):
            raise ValueError(f"{tiles} tiles are too few for the model")

    def _encode_in_windows(
        self, x: torch.Tensor, angles: Angles | None, tiles: int, rows: int, columns: int
    ) -> torch.Tensor:
        """Run the layers over patches that are ordered by windows; return embeddings in the usual order."""
        merge = self.config.merge
        if tiles != 1:
            raise ValueError(f"an image of this model is one tile, not {tiles}")
        order, windows = order_by_window(
            rows // merge, columns // merge, self.config.window, merge, self.device
        )

        def reorder(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.view(len(order), merge * merge, *tensor.shape[1:])[order].flatten(0, 1)

        if angles is not None:
            angles = reorder(angles[0]), reorder(angles[1])
        whole, within = self.attention.plan(((1, len(x)),)), self.attention.plan(windows)
        states = self._run_layers(reorder(x), angles, whole, within)
        embeddings = self._project(states)
        return torch.empty_like(embeddings).index_copy_(0, order, embeddings)

    def _run_layers(
        self, x: torch.Tensor, angles: Angles | None, whole: Attend, within: Attend | None = None
    ) -> dict[int, torch.Tensor]:
        """Run the layers over tokens; return the hidden states that the projectors need, by index.

        Args:
            x: Input of the first layer [tokens, hidden].
            angles: Angles of the tokens; None without rotary embedding.
            whole: Attention of layers with full attention.
            within: Attention of the other layers; None if all layers have full attention.
        """
        states = {0: x} if 0 in self.features else {}
        for layer, block in enumerate(self.blocks):
            x = block(x, angles, whole if within is None or layer in self.config.full_layers else within)
            if layer + 1 in self.features:
                states[layer + 1] = x
        return states

    def _project(self, states: dict[int, torch.Tensor]) -> torch.Tensor:
        outputs = [projector(states) for projector in self.projectors]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def make_vision_encoder(build: BuildContext, config: VisionConfig) -> VisionEncoder:
    """Make the vision encoder of a model, without its weights.

    It is neither sharded nor quantized: a rank that makes it holds the whole encoder.
    """
    whole = replace(build, mesh=Mesh(), collectives=SINGLE_RANK, make_linear=UnquantizedLinear)
    return VisionEncoder(whole, config)
