# SPDX-License-Identifier: Apache-2.0
"""Images of Qwen2-VL, Qwen2.5-VL and Qwen3-VL (arXiv 2409.12191, 2502.13923, 2511.21631).

An image nearly keeps its aspect ratio. Its edges become multiples of a factor, the edge of the square that
one embedding covers, and its number of pixels is kept within bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mizzen.core.request import Int32
from mizzen.images.limits import require_aspect_ratio
from mizzen.images.settings import BICUBIC, ImageSettings, find_token_text
from mizzen.images.types import ImageDrawing, ImageGeometry, InvalidImage, PixelLimits, PixelNormalization

PATCH_SIZES = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_vl_moe": 16}
"""Default of the patch size by model type."""
_IMAGE_PAD_ID = 151655
_MIN_PIXELS = 56 * 56
_MAX_PIXELS = 28 * 28 * 1280


@dataclass(frozen=True, slots=True)
class QwenImageRules:
    """Rules of the Qwen-VL families."""

    placeholder: str
    placeholder_id: int
    patch_size: int
    """Edge of a patch in pixels."""
    rotary_merge: int
    pixel_bounds: tuple[int, int] | None
    resample: int
    normalization: PixelNormalization

    def geometry(self, width: int, height: int, limits: PixelLimits | None = None) -> ImageGeometry:
        """Return the sizes of an image; see `ImageRules.geometry`."""
        min_pixels, max_pixels = self._bound_pixels(limits)
        factor = self.patch_size * self.rotary_merge
        new_width, new_height = fit_pixels(width, height, factor, min_pixels, max_pixels)
        rows, columns = new_height // self.patch_size, new_width // self.patch_size
        return ImageGeometry(
            tiles=1,
            height=new_height,
            width=new_width,
            grid=(1, rows, columns),
            embeddings=rows * columns // self.rotary_merge**2,
        )

    def drawings(
        self, width: int, height: int, limits: PixelLimits | None = None
    ) -> tuple[ImageDrawing, ...]:
        """Return the resizing of an image; see `ImageRules.drawings`."""
        geometry = self.geometry(width, height, limits)
        return (ImageDrawing.resize((geometry.width, geometry.height), self.resample),)

    def expansion(self, geometry: ImageGeometry) -> Int32:
        """Return one placeholder for each embedding."""
        return np.full(geometry.embeddings, self.placeholder_id, np.int32)

    def fingerprint(self) -> bytes:
        """Return the rules as bytes."""
        return repr(self).encode()

    def _bound_pixels(self, limits: PixelLimits | None) -> tuple[int, int]:
        """Return the smallest and largest number of pixels under a request's limits."""
        lower, upper = self.pixel_bounds or (_MIN_PIXELS, _MAX_PIXELS)
        if limits is None:
            return lower, upper
        low = lower if limits.min_pixels is None else limits.min_pixels
        high = upper if limits.max_pixels is None else limits.max_pixels
        for name, value in (("min_pixels", low), ("max_pixels", high)):
            if not lower <= value <= upper:
                raise InvalidImage(f"{name} must be from {lower} to {upper} for this model, not {value}")
        if low > high:
            raise InvalidImage(f"min_pixels ({low}) must not be larger than max_pixels ({high})")
        return low, high


def fit_pixels(width: int, height: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return the width and height, multiples of `factor`, to which an image is resized.

    Raises:
        InvalidImage: see `require_aspect_ratio`.
    """
    require_aspect_ratio(width, height)
    # Python's `round` rounds halves to even numbers, as Transformers does.
    new_width, new_height = round(width / factor) * factor, round(height / factor) * factor
    if new_width * new_height > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
    elif new_width * new_height < min_pixels:
        stretch = math.sqrt(min_pixels / (height * width))
        new_width = math.ceil(width * stretch / factor) * factor
        new_height = math.ceil(height * stretch / factor) * factor
    return new_width, new_height


def read_qwen_rules(
    config: ImageSettings, preprocessor: ImageSettings, tokens: Mapping[str, int], model_type: str
) -> QwenImageRules:
    """Read the rules of a model with one of the types `PATCH_SIZES`.

    Raises:
        ValueError: a field has an invalid value, or the image processor does not fit the vision encoder.
    """
    vision = config.section("vision_config")
    patch_size = vision.integer("patch_size", PATCH_SIZES[model_type])
    merge_size = vision.integer("spatial_merge_size", 2)
    for name, value in (("patch_size", patch_size), ("merge_size", merge_size)):
        if preprocessor.integer(name, value) != value:
            raise preprocessor.error(name, f"must be that of the vision encoder, {value}")
    preprocessor.require_flag("do_resize")
    placeholder_id = config.token_id(("image_token_id",), _IMAGE_PAD_ID)
    return QwenImageRules(
        placeholder=find_token_text(tokens, placeholder_id, "<|image_pad|>"),
        placeholder_id=placeholder_id,
        patch_size=patch_size,
        rotary_merge=merge_size,
        pixel_bounds=_read_bounds(preprocessor),
        resample=preprocessor.integer("resample", BICUBIC),
        normalization=preprocessor.normalization(),
    )


def _read_bounds(preprocessor: ImageSettings) -> tuple[int, int]:
    """Read the numbers of pixels: `min_pixels` and `max_pixels` take precedence over the edges of `size`."""
    size = preprocessor.edges("size", {"shortest_edge": _MIN_PIXELS, "longest_edge": _MAX_PIXELS})
    lower = preprocessor.integer("min_pixels", size.get("shortest_edge", size.get("min_pixels", _MIN_PIXELS)))
    upper = preprocessor.integer("max_pixels", size.get("longest_edge", size.get("max_pixels", _MAX_PIXELS)))
    if lower > upper:
        raise preprocessor.error("min_pixels", f"must not be larger than max_pixels, {upper}")
    return lower, upper
