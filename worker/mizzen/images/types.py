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
    """Number of tiles of equal size that the encoder receives; 1 unless the model cuts images into tiles."""
    height: int
    """Height of each tile in pixels."""
    width: int
    """Width of each tile in pixels."""
    grid: tuple[int, int, int]
    """Frames (1), rows and columns of patches, before any merging. For models that cut images into tiles,
    which follow a tile of the whole image: the number of rows of tiles, and the rows and columns of
    embeddings of all these tiles that remain without padding."""
    embeddings: int
    """Number of embeddings of the image."""

    @property
    def pixel_shape(self) -> tuple[int, int, int, int]:
        """Shape of the pixels that the encoder receives, uint8 [tiles, height, width, 3]."""
        return self.tiles, self.height, self.width, 3


@dataclass(frozen=True, slots=True)
class PixelNormalization:
    """Conversion of 8-bit values to the encoder's inputs: (value * scale - mean) / deviation, per channel."""

    scale: float
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class ImageDrawing:
    """Steps from an image, as displayed and in RGB, to tiles of equal size.

    The image is padded to a square if `square_color` is set, resized to `resized`, and drawn on a black
    canvas with its upper left corner at `corner`; parts outside of the canvas are lost. The canvas is cut
    into tiles, row by row.
    """

    resized: tuple[int, int]
    """Width and height to which the whole image is resized."""
    resample: int
    """Filter for resizing, a number of Pillow's `Image.Resampling`."""
    corner: tuple[int, int]
    """Column and row of the canvas; negative numbers crop the image."""
    canvas: tuple[int, int]
    """Width and height, multiples of those of a tile."""
    tile: tuple[int, int]
    """Width and height of a tile."""
    square_color: tuple[int, int, int] | None = None
    """Color of the bars that make the original a square before it is resized; None if it keeps its shape."""

    @classmethod
    def resize(cls, size: tuple[int, int], resample: int) -> ImageDrawing:
        """Return the drawing that resizes the image to a single tile of this size (width, height)."""
        return cls(size, resample, corner=(0, 0), canvas=size, tile=size)


class ImageRules(Protocol):
    """Rules of a model by which images are resized and replaced by tokens; implementations can be pickled."""

    @property
    def placeholder(self) -> str:
        """Text of the placeholder in rendered chat templates, such as `<|image_pad|>`."""
        ...

    @property
    def placeholder_id(self) -> int:
        """Token id of the placeholder."""
        ...

    @property
    def rotary_merge(self) -> int:
        """Patches in each direction that one embedding covers, if rotary positions follow the grid of an
        image (M-RoPE); 0 for other models."""
        ...

    @property
    def pixel_bounds(self) -> tuple[int, int] | None:
        """Smallest and largest number of pixels to which a request may resize images; None if it may not."""
        ...

    @property
    def normalization(self) -> PixelNormalization:
        """Conversion of pixels to the encoder's inputs."""
        ...

    def geometry(self, width: int, height: int, limits: PixelLimits | None = None) -> ImageGeometry:
        """Return the sizes for an image of `width` x `height` pixels, as displayed.

        Raises:
            InvalidImage: the model does not accept this size or these limits; the message names the bound.
        """
        ...

    def drawings(
        self, width: int, height: int, limits: PixelLimits | None = None
    ) -> tuple[ImageDrawing, ...]:
        """Return the steps from an image of this size to its tiles, `geometry(...).tiles` in total, in order.

        Raises:
            InvalidImage: as `geometry`.
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
