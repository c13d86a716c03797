# SPDX-License-Identifier: Apache-2.0
"""Time to encode images, in prompt tokens, so that encodings and prompts share a step's budget."""

from __future__ import annotations

import math

from msgspec import Struct

from mizzen.core.images.types import Pixels


class EncodingCost(Struct, frozen=True, kw_only=True):
    """Numbers of prompt tokens whose computation takes as long as parts of an encoding."""

    patch_size: int
    """Height and width of a patch in pixels."""
    patch_tokens: float
    """Prompt tokens for a patch, without the attention to all patches of its tile."""
    pair_tokens: float
    """Prompt tokens for the attention of a patch to another one."""
    least: int = 0
    """Prompt tokens for the encoding of any number of images, for which kernels must be launched."""
    full_layers: tuple[bool, ...] = (True,)
    """Whether each layer of the encoder attends to all patches of a tile; others attend within windows."""

    @property
    def layers(self) -> int:
        """Number of layers of the encoder."""
        return len(self.full_layers)

    def tokens(self, pixels: Pixels, *, first: bool) -> int:
        """Return the prompt tokens for an image; `first` if the step has encoded none before."""
        patch, pair = self._work(pixels)
        return max(math.ceil(patch + pair), self.least if first else 1)

    def divide(self, pixels: Pixels, begin: int, budget: int) -> tuple[int, int]:
        """Return the end of the layers from `begin` on, at least one, that a budget allows, and their cost.

        A layer costs at least its share of the launches.

        Args:
            pixels: the image.
            begin: number of layers that have run.
            budget: number of prompt tokens.
        """
        patch, pair = self._work(pixels)
        patch, pair = patch / self.layers, pair / max(1, sum(self.full_layers))
        launches = self.least / self.layers
        end, cost = begin, 0.0
        for full in self.full_layers[begin:]:
            layer = max(patch + pair if full else patch, launches)
            if end > begin and cost + layer > budget:
                break
            end, cost = end + 1, cost + layer
        return end, max(math.ceil(cost), 1)

    def _work(self, pixels: Pixels) -> tuple[float, float]:
        """Return the prompt tokens for the patches of an image, and for the attention among them."""
        tiles, height, width, _ = pixels.shape
        patches = height * width // self.patch_size**2
        return tiles * patches * self.patch_tokens, tiles * patches**2 * self.pair_tokens
