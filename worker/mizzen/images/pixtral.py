# SPDX-License-Identifier: Apache-2.0
"""Images of Pixtral (arXiv 2410.07073) and Mistral 3.

An image keeps its aspect ratio and becomes rows of embeddings. In the prompt a token ends each row, and
another one ends the image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mizzen.core.request import Int32
from mizzen.images.limits import refuse_limits, require_aspect_ratio
from mizzen.images.settings import BICUBIC, ImageSettings, find_token_text
from mizzen.images.types import ImageDrawing, ImageGeometry, PixelLimits, PixelNormalization

_IMAGE_TOKEN_INDEX = 10
_ROW_TOKENS = {"[IMG_BREAK]": 12, "[IMG_END]": 13}
"""Token ids in Mistral's tokenizers, in which `[IMG]` has the id `_IMAGE_TOKEN_INDEX`."""


@dataclass(frozen=True, slots=True)
class PixtralImageRules:
    """Rules of models with Pixtral's vision encoder."""

    placeholder: str
    placeholder_id: int
    row_end_id: int
    """Token id that ends each row of embeddings but the last."""
    image_end_id: int
    """Token id that ends the last row."""
    patch_size: int
    """Edge of a patch in pixels."""
    merge_size: int
    """Patches in each direction that one embedding covers."""
    max_width: int
    max_height: int
    resample: int
    normalization: PixelNormalization
    rotary_merge: int = 0
    pixel_bounds: tuple[int, int] | None = None

    def geometry(self, width: int, height: int, limits: PixelLimits | None = None) -> ImageGeometry:
        """Return the sizes of an image; see `ImageRules.geometry`."""
        refuse_limits(limits, f"keeps images within {self.max_width} x {self.max_height} pixels")
        # Narrower images would have no pixels after they are made smaller.
        require_aspect_ratio(width, height, self.max_width if width > height else self.max_height)
        ratio = max(height / self.max_height, width / self.max_width)
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        rows, columns = self._round_up(height), self._round_up(width)
        return ImageGeometry(
            tiles=1,
            height=rows * self.patch_size,
            width=columns * self.patch_size,
            grid=(1, rows, columns),
            embeddings=rows * columns // self.merge_size**2,
        )

    def drawings(
        self, width: int, height: int, limits: PixelLimits | None = None
    ) -> tuple[ImageDrawing, ...]:
        """Return the resizing of an image; see `ImageRules.drawings`."""
        geometry = self.geometry(width, height, limits)
        return (ImageDrawing.resize((geometry.width, geometry.height), self.resample),)

    def expansion(self, geometry: ImageGeometry) -> Int32:
        """Return rows of placeholders, each with the token that ends it."""
        _, rows, columns = geometry.grid
        ids = np.full(
            (rows // self.merge_size, columns // self.merge_size + 1), self.placeholder_id, np.int32
        )
        ids[:, -1] = self.row_end_id
        ids[-1, -1] = self.image_end_id
        return ids.ravel()

    def fingerprint(self) -> bytes:
        """Return the rules as bytes."""
        return repr(self).encode()

    def _round_up(self, length: int) -> int:
        """Return the number of patches that cover a length in pixels, rounded up to whole embeddings."""
        return -(-length // (self.patch_size * self.merge_size)) * self.merge_size


def read_pixtral_rules(
    config: ImageSettings, preprocessor: ImageSettings, tokens: Mapping[str, int], merge_size: int
) -> PixtralImageRules | None:
    """Read the rules of a model; None if its encoder is not Pixtral's.

    Args:
        config: settings of config.json.
        preprocessor: settings of preprocessor_config.json.
        tokens: ids of added tokens by text.
        merge_size: default of `spatial_merge_size`.

    Raises:
        ValueError: a field has an invalid value, the tokenizer lacks a token that ends rows, or the image
            processor does not fit the vision encoder.
    """
    vision = config.section("vision_config")
    if vision.text("model_type", "pixtral") != "pixtral":
        return None
    has_defaults = not config.has("vision_config")
    patch_size = vision.integer("patch_size", 14 if has_defaults else 16)
    image_size = vision.integer("image_size", 1540 if has_defaults else 1024)
    preprocessor.require_flag("do_resize")
    placeholder_id = config.token_id(("image_token_index", "image_token_id"), _IMAGE_TOKEN_INDEX)
    row_end_id, image_end_id = _read_row_tokens(tokens, placeholder_id)
    max_width, max_height = _read_bounds(preprocessor)
    rules = PixtralImageRules(
        placeholder=find_token_text(tokens, placeholder_id, "[IMG]"),
        placeholder_id=placeholder_id,
        row_end_id=row_end_id,
        image_end_id=image_end_id,
        patch_size=patch_size,
        merge_size=config.integer("spatial_merge_size", merge_size),
        max_width=max_width,
        max_height=max_height,
        resample=preprocessor.integer("resample", BICUBIC),
        normalization=preprocessor.normalization(),
    )
    largest = rules.geometry(rules.max_width, rules.max_height)
    if max(largest.width, largest.height) // patch_size > image_size // patch_size:
        raise preprocessor.error(
            "size", f"must be at most the image_size of the vision encoder, {image_size}"
        )
    return rules


def _read_bounds(preprocessor: ImageSettings) -> tuple[int, int]:
    """Return the largest width and height."""
    size = preprocessor.edges("size", {"longest_edge": 1024})
    longest = size.get("longest_edge")
    if longest is None and size.keys() != {"height", "width"}:
        raise preprocessor.error("size", "must have a longest_edge, or a height and a width")
    return longest or size["width"], longest or size["height"]


def _read_row_tokens(tokens: Mapping[str, int], placeholder_id: int) -> tuple[int, int]:
    """Return the ids of the tokens that end rows and images."""
    if not tokens and placeholder_id == _IMAGE_TOKEN_INDEX:
        tokens = _ROW_TOKENS
    for text in _ROW_TOKENS:
        if text not in tokens:
            raise ValueError(f"tokenizer.json: added_tokens must contain {text}, which ends rows of images")
    row_end, image_end = _ROW_TOKENS
    return tokens[row_end], tokens[image_end]
