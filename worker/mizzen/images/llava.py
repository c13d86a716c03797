# SPDX-License-Identifier: Apache-2.0
"""Images of LLaVA 1.5 (arXiv 2310.03744), whose encoder CLIP or SigLIP takes squares of a fixed size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mizzen.core.request import Int32
from mizzen.images.limits import refuse_limits, require_aspect_ratio
from mizzen.images.settings import BICUBIC, CLIP_DEVIATION, CLIP_MEAN, ImageSettings, find_token_text
from mizzen.images.types import ImageDrawing, ImageGeometry, PixelLimits, PixelNormalization

IMAGE_TOKEN_INDEX = 32000
"""Default of the placeholder's token id."""
_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True)
class SquareTower:
    """Sizes of an encoder of square images: CLIP or SigLIP."""

    image_size: int
    """Edge of an image in pixels."""
    patches: int
    """Number of patches along an edge."""
    embeddings: int
    """Number of embeddings of an image: one for each patch, and the class embedding unless it is dropped."""


@dataclass(frozen=True, slots=True)
class SquareResizing:
    """Resizing to the square that an encoder takes."""

    shortest_edge: int | None
    """Length to which the shorter edge is resized; the center is then cropped. None if both edges are resized
    to the square, regardless of the aspect ratio."""
    resample: int
    square_color: tuple[int, int, int] | None
    """Color of bars that pad the original to a square; None without padding."""

    def draw(self, width: int, height: int, edge: int) -> ImageDrawing:
        """Return the steps from an image of `width` x `height` pixels to a square with this edge."""
        square, color = (edge, edge), None if width == height else self.square_color
        if color:
            width = height = max(width, height)
        resized = square
        if self.shortest_edge is not None:
            short = self.shortest_edge
            long = int(short * max(width, height) / min(width, height))
            resized = (short, long) if width <= height else (long, short)
        corner = _center(resized[0], edge), _center(resized[1], edge)
        return ImageDrawing(resized, self.resample, corner, canvas=square, tile=square, square_color=color)


def _center(length: int, edge: int) -> int:
    """Return the start of a centered interval on a canvas with this edge, rounded as in Transformers."""
    return -((length - edge) // 2)


@dataclass(frozen=True, slots=True)
class LlavaImageRules:
    """Rules of LLaVA 1.5: all images have the same number of embeddings."""

    placeholder: str
    placeholder_id: int
    tower: SquareTower
    resizing: SquareResizing
    normalization: PixelNormalization
    rotary_merge: int = 0
    pixel_bounds: tuple[int, int] | None = None

    def geometry(self, width: int, height: int, limits: PixelLimits | None = None) -> ImageGeometry:
        """Return the sizes, which do not depend on those of the image; see `ImageRules.geometry`."""
        require_aspect_ratio(width, height)  # bounds the longer edge where the shorter one has a fixed length
        edge = self.tower.image_size
        refuse_limits(limits, f"resizes all images to {edge} x {edge} pixels")
        return ImageGeometry(
            tiles=1,
            height=edge,
            width=edge,
            grid=(1, self.tower.patches, self.tower.patches),
            embeddings=self.tower.embeddings,
        )

    def drawings(
        self, width: int, height: int, limits: PixelLimits | None = None
    ) -> tuple[ImageDrawing, ...]:
        """Return the resizing of an image; see `ImageRules.drawings`."""
        self.geometry(width, height, limits)
        return (self.resizing.draw(width, height, self.tower.image_size),)

    def expansion(self, geometry: ImageGeometry) -> Int32:
        """Return one placeholder for each embedding."""
        return np.full(geometry.embeddings, self.placeholder_id, np.int32)

    def fingerprint(self) -> bytes:
        """Return the rules as bytes."""
        return repr(self).encode()


def read_llava_rules(
    config: ImageSettings, preprocessor: ImageSettings, tokens: Mapping[str, int]
) -> LlavaImageRules | None:
    """Read the rules of a model of type `llava`; None if its encoder is neither CLIP nor SigLIP.

    Raises:
        ValueError: a field has an invalid value, or the image processor does not fit the vision encoder.
    """
    tower = read_tower(config)
    if tower is None:
        return None
    placeholder_id = config.token_id(("image_token_index", "image_token_id"), IMAGE_TOKEN_INDEX)
    return LlavaImageRules(
        placeholder=find_token_text(tokens, placeholder_id, "<image>"),
        placeholder_id=placeholder_id,
        tower=tower,
        resizing=_read_resizing(preprocessor, tower.image_size),
        normalization=read_square_normalization(preprocessor),
    )


def read_tower(config: ImageSettings) -> SquareTower | None:
    """Read the sizes of the vision encoder; None if it is neither CLIP nor SigLIP.

    Raises:
        ValueError: a field has an invalid value.
    """
    vision = config.section("vision_config")
    kind = vision.text("model_type", "clip_vision_model")
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        return None
    is_clip = kind == "clip_vision_model"
    default_size, default_patch = (224, 32) if is_clip else (224, 16)
    if not config.has("vision_config"):
        default_size, default_patch = 336, 14
    image_size = vision.integer("image_size", default_size)
    patches = image_size // vision.integer("patch_size", default_patch)
    strategy = config.text("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise config.error("vision_feature_select_strategy", "must be default or full")
    # The strategy `default` drops the first embedding, which is that of the class only in CLIP.
    embeddings = patches**2 + int(is_clip) - int(strategy == "default")
    if embeddings < 1:
        raise vision.error("patch_size", f"must be at most image_size, {image_size}")
    return SquareTower(image_size, patches, embeddings)


def is_siglip_processor(preprocessor: ImageSettings) -> bool:
    """Return whether defaults are those of SigLIP's image processor and not of CLIP's and LLaVA's."""
    return preprocessor.text("image_processor_type", "").startswith("Siglip")


def read_square_normalization(preprocessor: ImageSettings) -> PixelNormalization:
    """Read the normalization, with the defaults of SigLIP, CLIP or LLaVA.

    Raises:
        ValueError: a field has an invalid value.
    """
    siglip = is_siglip_processor(preprocessor)
    return preprocessor.normalization(_HALF if siglip else CLIP_MEAN, _HALF if siglip else CLIP_DEVIATION)


def _read_resizing(preprocessor: ImageSettings, image_size: int) -> SquareResizing:
    """Read the resizing; its result must be the square that the encoder takes."""
    square = {"height": image_size, "width": image_size}
    crops = preprocessor.flag("do_center_crop", not is_siglip_processor(preprocessor))
    size = preprocessor.edges("size", {"shortest_edge": image_size} if crops else square)
    preprocessor.require_flag("do_resize")
    if crops and preprocessor.edges("crop_size", square) != square:
        raise preprocessor.error("crop_size", f"must be the image_size of the vision encoder, {image_size}")
    if size != square and not (crops and size.keys() == {"shortest_edge"}):
        raise preprocessor.error("size", f"must have a height and width of {image_size}, or a shortest_edge")
    color = None
    if preprocessor.flag("do_pad", False):
        mean = preprocessor.channels("image_mean", CLIP_MEAN)
        color = int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255)
    return SquareResizing(size.get("shortest_edge"), preprocessor.integer("resample", BICUBIC), color)
