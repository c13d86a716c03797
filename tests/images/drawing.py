# SPDX-License-Identifier: Apache-2.0
"""A plain implementation of `ImageDrawing`, to compare its pixels with those of Transformers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from PIL import Image

from mizzen.images.types import ImageDrawing


def draw_tiles(image: Image.Image, drawings: Iterable[ImageDrawing]) -> np.ndarray:
    """Return the tiles of all drawings, uint8 [tiles, height, width, 3]."""
    tiles = []
    for drawing in drawings:
        canvas = Image.new("RGB", drawing.canvas)
        source = image
        if drawing.square_color:
            edge = max(image.size)
            source = Image.new("RGB", (edge, edge), drawing.square_color)
            source.paste(image, ((edge - image.width) // 2, (edge - image.height) // 2))
        canvas.paste(source.resize(drawing.resized, drawing.resample), drawing.corner)
        width, height = drawing.tile
        for top in range(0, canvas.height, height):
            tiles += [
                np.array(canvas.crop((left, top, left + width, top + height)))
                for left in range(0, canvas.width, width)
            ]
    return np.stack(tiles)
