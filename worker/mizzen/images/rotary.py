# SPDX-License-Identifier: Apache-2.0
"""Rotary positions of prompts with images in models with M-RoPE (arXiv 2409.12191, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mizzen.core.images.types import PromptImage
from mizzen.core.request import Int32
from mizzen.images.types import ImageRules


@dataclass(frozen=True, slots=True, eq=False)
class RotaryPositions:
    """Rotary positions of a prompt; see `Request.rotary` and `Request.rotary_offset`."""

    positions: Int32
    """Positions (time, height, width) of the tokens up to the end of the last image, int32 [3, m]."""
    offset: int
    """Difference between the rotary position and the index of all tokens from m on."""


def rotary_positions(images: Sequence[PromptImage], length: int, rules: ImageRules) -> RotaryPositions | None:
    """Return the rotary positions of a prompt; None without images or for models without M-RoPE.

    In texts all three positions grow by 1 with each token. If an image begins at position p, its embedding at
    (frame, row, column) has the positions (p + frame, p + row, p + column), and the text continues at p plus
    the larger number of rows or columns.

    Args:
        images: images of the prompt in order; the tokens of each are adjacent.
        length: number of tokens of the prompt.
        rules: the model's rules.

    Raises:
        ValueError: an image has more or fewer tokens than its grid, or they are beyond the prompt.
    """
    merge = rules.rotary_merge
    if not images or not merge:
        return None
    end = int(images[-1].positions[-1]) + 1
    positions = np.empty((3, end), np.int32)
    index = offset = 0
    for image in images:
        frames, rows, columns = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
        first, tokens = int(image.positions[0]), frames * rows * columns
        if len(image.positions) != tokens or first < index or first + tokens > min(end, length):
            raise ValueError(f"an image at token {first} does not have {tokens} tokens within the prompt")
        start = first + offset
        positions[:, index:first] = np.arange(index + offset, start, dtype=np.int32)
        block = np.empty((3, frames, rows, columns), np.int32)
        grid = np.ogrid[:frames, :rows, :columns]
        for axis in range(3):
            block[axis] = grid[axis] + start
        index = first + tokens
        positions[:, first:index] = block.reshape(3, tokens)
        offset = start + max(rows, columns) - index
    return RotaryPositions(positions, offset)
