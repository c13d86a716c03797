# SPDX-License-Identifier: Apache-2.0
"""The vision encoder: from the pixels of an image to embeddings that replace tokens of a prompt.

`mizzen.engine` runs it on rank 0, for one or several images at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from mizzen.attention.segments import Attend, make_segment_attention
from mizzen.layers.context import BuildContext
from mizzen.layers.linear_methods.unquantized import UnquantizedLinear
from mizzen.layers.sharding import Mesh
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.vision.block import VisionBlock
from mizzen.models.vision.config import CHANNELS, VisionConfig
from mizzen.models.vision.embedding import PatchEmbedding, TowerTensor
from mizzen.models.vision.layout import EncodingLayout, PatchGrid
from mizzen.models.vision.patches import PixelNormaliser, cut_patches
from mizzen.models.vision.positions import Angles, rotation_angles
from mizzen.models.vision.projector import Projector, join_tiles
from mizzen.parallel.collectives import SINGLE_RANK

EncoderImage = tuple[torch.Tensor, tuple[int, int, int]]
"""Pixels of an image in RGB, uint8 [tiles, height, width, 3], on any device, and `ImageGeometry.grid` of the
image, which only models that cut images into tiles need."""


@dataclass(slots=True)
class RunningEncoding:
    """Encoding of images in one pass, between two layers; its tensors are used in one stream."""

    layout: EncodingLayout
    grids: Sequence[tuple[int, int, int]]
    """`ImageGeometry.grid` of each image."""
    x: torch.Tensor
    """Sum of the embedding and of the outputs of attention and feed-forward blocks of the layers that have
    run, but for the newest feed-forward output, which is `inner` [tokens, hidden]; in the order of windows if
    layers attend within windows."""
    angles: Angles | None
    """Angles of the tokens in the order of `x`; None without rotary embedding."""
    whole: Attend
    """Attention of layers with full attention."""
    within: Attend | None
    """Attention of the other layers; None if all layers have full attention."""
    states: dict[int, torch.Tensor]
    """Hidden states that the projectors need, by the number of layers before them."""
    inner: torch.Tensor | None = None
    """Output of the last layer's feed-forward block, which is to be added to `x`."""
    layers: int = 0
    """Number of layers that have run."""


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
        """Encode one image; see `encode`."""
        return self.encode([(pixels, grid)])[0]

    def encode(self, images: Sequence[EncoderImage]) -> list[torch.Tensor]:
        """Encode images in one pass, without waiting for the device if the pixels are there.

        The tokens of all images form one batch, in which each tile attends to itself. An image's embeddings
        do not depend on the other images, except that GEMMs of different sizes may round differently.

        Returns:
            Embeddings of each image [embeddings, output * (1 + deepstack layers)] in the model's dtype: for
            each embedding that of the prompt, and then the features for the decoder's first layers.

        Raises:
            ValueError: the size of an image does not suit the model.
        """
        running = self.begin(images)
        self.run_layers(running, len(self.blocks))
        return self.end(running)

    def begin(self, images: Sequence[EncoderImage]) -> RunningEncoding:
        """Return the encoding of images in one pass before its first layer; see `encode`.

        Raises:
            ValueError: the size of an image does not suit the model.
        """
        config = self.config
        for pixels, _ in images:
            self._check_size(pixels)
        layout = EncodingLayout(config, [self._patch_grid(pixels) for pixels, _ in images], self.device)
        x = self.embedding(self._cut_patches([pixels for pixels, _ in images]), layout)
        angles = None if layout.positions is None else rotation_angles(config, layout.positions)
        whole, within = self.attention.plan(layout.whole_tiles), None
        if layout.order is not None:
            within = self.attention.plan(layout.windows)
            x = self._reorder(x, layout.order)
            if angles is not None:
                angles = self._reorder(angles[0], layout.order), self._reorder(angles[1], layout.order)
        states = {0: x.clone()} if 0 in self.features else {}
        return RunningEncoding(layout, [grid for _, grid in images], x, angles, whole, within, states)

    def run_layers(self, running: RunningEncoding, end: int) -> None:
        """Run the next layers of an encoding, up to the layer `end` (exclusive)."""
        full = self.config.full_layers
        for layer in range(running.layers, end):
            attend = running.whole if running.within is None or layer in full else running.within
            running.inner = self.blocks[layer](running.inner, running.x, running.angles, attend)
            if layer + 1 in self.features:
                running.states[layer + 1] = running.x + running.inner
        running.layers = end

    def end(self, running: RunningEncoding) -> list[torch.Tensor]:
        """Return the embeddings of each image of an encoding after its last layer; see `encode`."""
        config, layout, states = self.config, running.layout, running.states
        if config.drops_first:
            tiles = layout.tiles
            states = {
                index: state.view(tiles, len(state) // tiles, -1)[:, 1:].flatten(0, 1)
                for index, state in states.items()
            }
        embeddings = self._project(states)
        if layout.order is not None:
            embeddings = torch.empty_like(embeddings).index_copy_(0, layout.order, embeddings)
        parts = list(embeddings.split(layout.embeddings))
        if self.newline is None:
            return parts
        newline, side = self.newline.value, config.side
        return [
            join_tiles(part, newline, side, grid) for part, grid in zip(parts, running.grids, strict=True)
        ]

    def _reorder(self, tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Return rows of patches [patches, ...] in the order of windows.

        Args:
            tensor: Rows in the usual order.
            order: Index of the block of patches at each place, int64 [blocks].
        """
        return tensor.view(len(order), self.config.merge**2, *tensor.shape[1:])[order].flatten(0, 1)

    def _patch_grid(self, pixels: torch.Tensor) -> PatchGrid:
        size = self.config.patch_size
        return PatchGrid(len(pixels), pixels.shape[1] // size, pixels.shape[2] // size)

    def _cut_patches(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the normalised patches of images, uint8 [tiles, height, width, 3] each, one after another.

        The result is [patches, pixels of a patch] in the model's dtype.
        """
        flat = [pixels.to(self.device).reshape(-1, CHANNELS) for pixels in images]
        normalised = self.normalise(flat[0] if len(flat) == 1 else torch.cat(flat)).to(self.dtype)
        parts = normalised.split([len(part) for part in flat])
        patches = [
            cut_patches(part.view(pixels.shape), self.config)
            for part, pixels in zip(parts, images, strict=True)
        ]
        return patches[0] if len(patches) == 1 else torch.cat(patches)

    def _check_size(self, pixels: torch.Tensor) -> None:
        tiles, height, width, _ = pixels.shape
        size, unit = self.config.image_size, self.config.unit
        if size and (height, width) != (size, size):
            raise ValueError(f"the model's images have {size} x {size} pixels, not {width} x {height}")
        if not size and (height % unit or width % unit or not height or not width):
            raise ValueError(f"{width} x {height} pixels are no multiples of {unit}")
        if not tiles or (self.newline is not None and tiles < 2):
            raise ValueError(f"{tiles} tiles are too few for the model")

    def _project(self, states: dict[int, torch.Tensor]) -> torch.Tensor:
        outputs = [projector(states) for projector in self.projectors]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def make_vision_encoder(build: BuildContext, config: VisionConfig) -> VisionEncoder:
    """Make the vision encoder of a model, without its weights.

    It is neither sharded nor quantized: a rank that makes it holds the whole encoder.
    """
    whole = replace(build, mesh=Mesh(), collectives=SINGLE_RANK, make_linear=UnquantizedLinear)
    return VisionEncoder(whole, config)
