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

    def tokens(self, pixels: Pixels, *, first: bool) -> int:
        """Return the prompt tokens for an image; `first` if the step has encoded none before."""
        tiles, height, width, _ = pixels.shape
        patches = height * width // self.patch_size**2
        work = tiles * patches * (self.patch_tokens + self.pair_tokens * patches)
        return max(math.ceil(work), self.least if first else 1)
