# SPDX-License-Identifier: Apache-2.0
"""Images of LLaVA-NeXT, which cuts images into tiles ("AnyRes", https://llava-vl.github.io/blog/2024-01-30-llava-next).

The encoder receives the whole image as one tile, and then the image again at the best of several resolutions,
in tiles. The embeddings of the second part form one grid. Rows and columns that are only padding are removed
from this grid, and each of its rows ends with the embedding of a newline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mizzen.core.request import Int32
from mizzen.images.limits import refuse_limits, require_pixels
from mizzen.images.llava import IMAGE_TOKEN_INDEX, SquareTower, read_square_normalization, read_tower
from mizzen.images.settings import BICUBIC, ImageSettings, find_token_text
from mizzen.images.types import ImageDrawing, ImageGeometry, PixelLimits, PixelNormalization

_RESOLUTIONS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
"""Default of the resolutions (height, width)."""


@dataclass(frozen=True, slots=True)
class LlavaNextImageRules:
    """Rules of LLaVA-NeXT."""

    placeholder: str
    placeholder_id: int
    tower: SquareTower
    resolutions: tuple[tuple[int, int], ...]
    """Heights and widths of the canvases for tiles, multiples of the edge of a tile."""
    resample: int
    normalization: PixelNormalization
    rotary_merge: int = 0
    pixel_bounds: tuple[int, int] | None = None

    def geometry(self, width: int, height: int, limits: PixelLimits | None = None) -> ImageGeometry:
        """Return the sizes of an image; see `ImageRules.geometry`."""
        require_pixels(width, height)
        refuse_limits(limits, "chooses among fixed resolutions")
        canvas_height, canvas_width = self._choose_resolution(width, height)
        edge = self.tower.image_size
        tile_rows, tile_columns = canvas_height // edge, canvas_width // edge
        rows, columns = trim_padding(
            width, height, tile_rows * self.tower.patches, tile_columns * self.tower.patches
        )
        return ImageGeometry(
            tiles=1 + tile_rows * tile_columns,
            height=edge,
            width=edge,
            grid=(tile_rows, rows, columns),
            embeddings=self.tower.embeddings + rows * (columns + 1),
        )

    def drawings(
        self, width: int, height: int, limits: PixelLimits | None = None
    ) -> tuple[ImageDrawing, ...]:
        """Return the drawings of the whole image and of its tiles; see `ImageRules.drawings`."""
        self.geometry(width, height, limits)
        tile = self.tower.image_size, self.tower.image_size
        canvas_height, canvas_width = self._choose_resolution(width, height)
        resized = _fit_canvas(width, height, canvas_width, canvas_height)
        corner = (canvas_width - resized[0]) // 2, (canvas_height - resized[1]) // 2
        return (
            ImageDrawing.resize(tile, self.resample),
            ImageDrawing(resized, self.resample, corner, canvas=(canvas_width, canvas_height), tile=tile),
        )

    def expansion(self, geometry: ImageGeometry) -> Int32:
        """Return one placeholder for each embedding, those of newlines included."""
        return np.full(geometry.embeddings, self.placeholder_id, np.int32)

    def fingerprint(self) -> bytes:
        """Return the rules as bytes."""
        return repr(self).encode()

    def _choose_resolution(self, width: int, height: int) -> tuple[int, int]:
        """Return the height and width of the canvas that keeps most pixels, and of these the smallest."""

        def rate(resolution: tuple[int, int]) -> tuple[int, int]:
            canvas_height, canvas_width = resolution
            scale = min(canvas_width / width, canvas_height / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - canvas_width * canvas_height

        return max(self.resolutions, key=rate)  # the first of equals


def _fit_canvas(width: int, height: int, canvas_width: int, canvas_height: int) -> tuple[int, int]:
    """Return the largest width and height of an image within a canvas at its aspect ratio."""
    scale_x, scale_y = canvas_width / width, canvas_height / height
    if scale_x < scale_y:
        return canvas_width, min(math.ceil(height * scale_x), canvas_height)
    return min(math.ceil(width * scale_y), canvas_width), canvas_height


def trim_padding(width: int, height: int, rows: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns of a grid that remain without padding, for an image drawn at its center.

    Both sides lose the same number, so one row or column of padding may remain. Narrow images may lose all
    rows or columns.
    """
    # The order of operations and the seven digits are those of Transformers, which decide about halves.
    if width / height > columns / rows:
        image_rows = int(round(height * (columns / width), 7))
        return rows - 2 * ((rows - image_rows) // 2), columns
    image_columns = int(round(width * (rows / height), 7))
    return rows, columns - 2 * ((columns - image_columns) // 2)


def read_llava_next_rules(
    config: ImageSettings, preprocessor: ImageSettings, tokens: Mapping[str, int]
) -> LlavaNextImageRules | None:
    """Read the rules of a model of type `llava_next`; None if its encoder is neither CLIP nor SigLIP.

    Raises:
        ValueError: a field has an invalid value, or the image processor does not fit the vision encoder.
    """
    tower = read_tower(config)
    if tower is None:
        return None
    if tower.embeddings != tower.patches**2:
        raise config.error("vision_feature_select_strategy", "must leave one embedding for each patch")
    for name in ("size", "crop_size"):
        edges = preprocessor.edges(name, {"shortest_edge": tower.image_size})
        if set(edges.values()) != {tower.image_size}:
            raise preprocessor.error(
                name, f"must be the image_size of the vision encoder, {tower.image_size}"
            )
    placeholder_id = config.token_id(("image_token_index", "image_token_id"), IMAGE_TOKEN_INDEX)
    return LlavaNextImageRules(
        placeholder=find_token_text(tokens, placeholder_id, "<image>"),
        placeholder_id=placeholder_id,
        tower=tower,
        resolutions=_read_resolutions(config, preprocessor, tower.image_size),
        resample=preprocessor.integer("resample", BICUBIC),
        normalization=read_square_normalization(preprocessor),
    )


def _read_resolutions(
    config: ImageSettings, preprocessor: ImageSettings, edge: int
) -> tuple[tuple[int, int], ...]:
    """Read the resolutions, which the model and its image processor must share."""
    name = "image_grid_pinpoints"
    resolutions = config.pairs(name, _RESOLUTIONS)
    if preprocessor.pairs(name, resolutions) != resolutions:
        raise preprocessor.error(name, "must be those of config.json")
    if any(height % edge or width % edge for height, width in resolutions):
        raise config.error(name, f"must be multiples of the image_size of the vision encoder, {edge}")
    return resolutions
