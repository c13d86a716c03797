# SPDX-License-Identifier: Apache-2.0
"""Draws images on canvases and cuts these into tiles, as `ImageDrawing` describes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from mizzen.core.images.types import Pixels
from mizzen.images.types import ImageDrawing


def draw_tiles(image: Image.Image, drawings: Sequence[ImageDrawing]) -> Pixels:
    """Return the tiles of an RGB image, those of each drawing in order.

    Returns:
        Pixels, uint8 [tiles, height, width, 3].
    """
    tiles = [cut_tiles(draw_canvas(image, drawing), drawing.tile) for drawing in drawings]
    return tiles[0] if len(tiles) == 1 else np.concatenate(tiles)


def draw_canvas(image: Image.Image, drawing: ImageDrawing) -> Pixels:
    """Return the canvas of a drawing, uint8 [height, width, 3]."""
    if drawing.square_color is not None:
        image = pad_to_square(image, drawing.square_color)
    if image.size != drawing.resized:
        # Neither `reducing_gap` nor the draft mode of JPEG is used, because they change pixels.
        image = image.resize(drawing.resized, drawing.resample)
    resized = np.asarray(image)
    if drawing.canvas == drawing.resized and drawing.corner == (0, 0):
        return resized
    canvas = np.zeros((drawing.canvas[1], drawing.canvas[0], 3), np.uint8)
    column, row = drawing.corner
    target = canvas[max(0, row) :, max(0, column) :]
    source = resized[max(0, -row) :, max(0, -column) :]
    height, width = min(len(target), len(source)), min(target.shape[1], source.shape[1])
    target[:height, :width] = source[:height, :width]
    return canvas


def pad_to_square(image: Image.Image, color: tuple[int, int, int]) -> Image.Image:
    """Center an image on a square whose edge is the image's longer one."""
    edge = max(image.size)
    square = Image.new("RGB", (edge, edge), color)
    square.paste(image, ((edge - image.width) // 2, (edge - image.height) // 2))
    return square


def cut_tiles(canvas: Pixels, tile: tuple[int, int]) -> Pixels:
    """Cut a canvas, uint8 [height, width, 3], row by row into tiles of size `tile` (width, height).

    Returns:
        Tiles, uint8 [tiles, height, width, 3].
    """
    width, height = tile
    rows, columns = canvas.shape[0] // height, canvas.shape[1] // width
    if (rows, columns) == (1, 1):
        return canvas[None]
    cut = canvas.reshape(rows, height, columns, width, 3).transpose(0, 2, 1, 3, 4)
    return cut.reshape(rows * columns, height, width, 3)
