# SPDX-License-Identifier: Apache-2.0
"""Types that describe images of prompts, shared by the gateway, `LLM` and the engine.

A model sees an image as a sequence of embeddings. In the prompt's token ids, each embedding has one
*placeholder*, a token with the id `ImageRules.placeholder_id`. A chat template writes a single placeholder
for an image; `ImageRules.expansion` gives the token ids that replace it, which depend on the image's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mizzen.core.request import Int32


class InvalidImage(ValueError):
    """The bytes are not an image that can be read, or the image has a size that the model does not accept.

    The message describes the problem in words that may be sent to the client: it contains neither text of a
    library nor addresses.
    """


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Format and size of an image, read from the header of its file."""

    format: str
    """`jpeg`, `png`, `webp` or `gif`."""
    width: int
    """Width in pixels as displayed, after the rotation that `orientation` asks for."""
    height: int
    """Height in pixels as displayed."""
    orientation: int = 1
    """Orientation of EXIF, from 1 (as stored) to 8."""


@dataclass(frozen=True, slots=True)
class PixelLimits:
    """Bounds of the number of pixels to which a request may resize its images; None for the model's own."""

    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True, slots=True)
class ImageGeometry:
    """Sizes of a resized image, which follow from the size of the original and the rules of the model."""

    tiles: int
    """Number of images of equal size that the encoder receives; 1 unless the model cuts images into tiles."""
    height: int
    """Height of each tile in pixels."""
    width: int
    """Width of each tile in pixels."""
    grid: tuple[int, int, int]
    """Frames, rows and columns of the embeddings: (t, h, w) of patches before any merging for Qwen; rows and
    columns of tiles for models that cut images; rows and columns of patches for others."""
    embeddings: int
    """Number of embeddings of the image."""


class ImageRules(Protocol):
    """Rules of a model by which images are resized and replaced by tokens."""

    placeholder: str
    """Text of the placeholder in rendered chat templates, such as `<|image_pad|>`."""
    placeholder_id: int
    """Token id of the placeholder."""

    def geometry(self, width: int, height: int, limits: PixelLimits | None = None) -> ImageGeometry:
        """Return the sizes for an image of `width` x `height` pixels, as displayed.

        Raises:
            InvalidImage: the model does not accept this size; the message names the bound.
        """
        ...

    def expansion(self, geometry: ImageGeometry) -> Int32:
        """Return the token ids that replace the placeholder in a prompt, int32 [n].

        The tokens with `placeholder_id` receive the embeddings, in order: `geometry.embeddings` tokens.
        """
        ...

    def fingerprint(self) -> bytes:
        """Return bytes that differ between rules that make different embeddings of the same image."""
        ...
