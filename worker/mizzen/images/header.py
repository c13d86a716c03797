# SPDX-License-Identifier: Apache-2.0
"""Reads format, size and orientation of an image file without a decoder.

The size is that of Pillow's `ImageOps.exif_transpose(Image.open(...))`. Readers visit the parts of a file one
by one, never a pixel, and stop after a fixed number of parts.
"""

from __future__ import annotations

from mizzen.images.formats import gif, jpeg, png, webp
from mizzen.images.formats.orientation import UPRIGHT, swaps_axes
from mizzen.images.limits import require_pixels
from mizzen.images.types import ImageHeader, InvalidImage

ACCEPTED_FORMATS = "JPEG, PNG, WebP or GIF"
"""Names of the accepted formats, for messages."""


def read_header(content: bytes) -> ImageHeader:
    """Read the header of an image file.

    Raises:
        InvalidImage: the file has another format, is damaged within its header, or has too few pixels.
    """
    name, (width, height, orientation) = _read_stored(content)
    require_pixels(width, height)
    if swaps_axes(orientation):
        width, height = height, width
    return ImageHeader(name, width, height, orientation)


def _read_stored(content: bytes) -> tuple[str, tuple[int, int, int]]:
    """Return the format, and width, height and orientation as stored."""
    if content.startswith(jpeg.SIGNATURE):
        return "jpeg", jpeg.read_jpeg(content)
    if content.startswith(png.SIGNATURE):
        return "png", png.read_png(content)
    if webp.is_webp(content):
        return "webp", webp.read_webp(content)
    if content.startswith(gif.SIGNATURES):
        return "gif", (*gif.read_gif(content), UPRIGHT)
    if not content:
        raise InvalidImage(f"the image is empty: send a {ACCEPTED_FORMATS} file")
    raise InvalidImage(f"the image has an unknown format: send a {ACCEPTED_FORMATS} file")
