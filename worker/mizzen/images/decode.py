# SPDX-License-Identifier: Apache-2.0
"""Decodes image files and resizes them for a model, with Pillow.

The pixels equal those of Transformers' PIL image processors (`image_processing_pil_*`) before rescaling and
normalization, given the image that `PIL.ImageOps.exif_transpose` returns. `mizzen.engine.images.decoder` runs
this in confined processes, because decoders of image formats are written in C and read hostile input.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from io import BytesIO

from PIL import ExifTags, Image

from mizzen.core.images.types import Pixels
from mizzen.images.drawing import draw_tiles
from mizzen.images.header import read_header
from mizzen.images.types import ImageRules, InvalidImage, PixelLimits

MAX_IMAGE_PIXELS = 64_000_000
"""Maximum number of pixels of an image before it is resized."""
TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transpositions that turn an image upright, by the orientation of EXIF."""
WHITE = (255, 255, 255, 255)


def decode_image(
    content: bytes, rules: ImageRules, header_size: tuple[int, int], limits: PixelLimits | None
) -> Pixels:
    """Decode the first frame of an image file, and resize it as the model's rules require.

    Args:
        content: The file: JPEG, PNG, WebP or GIF.
        rules: Rules of the model.
        header_size: Width and height in pixels, as displayed, that `read_header` returned for this file.
        limits: Bounds of the request on the resized image.

    Returns:
        RGB pixels, uint8 [tiles, height, width, 3], with the sizes of `rules.geometry(*header_size, limits)`.

    Raises:
        InvalidImage: the file is damaged, incomplete or too large, or has another size than `header_size`.
    """
    drawings = rules.drawings(*header_size, limits)
    check_pixels(header_size)
    try:
        with warnings.catch_warnings(action="ignore"), _open_image(content, header_size) as opened:
            image = convert_to_rgb(turn_upright(opened))
        if image.size != header_size:
            raise _size_mismatch(image.size, header_size)
        return draw_tiles(image, drawings)
    except InvalidImage:
        raise
    except MemoryError:
        raise InvalidImage("the image needs too much memory to decode: send a smaller image") from None
    except Exception:  # decoders raise many types; their messages may contain addresses and parts of the file
        raise InvalidImage("the image cannot be decoded, because its file is damaged or incomplete") from None


def preload_decoders() -> None:
    """Import all modules that Pillow otherwise imports when they are first needed.

    A confined process cannot open files, so it must call this before it is confined.
    """
    for name in ("JpegImagePlugin", "MpoImagePlugin", "PngImagePlugin", "WebPImagePlugin", "GifImagePlugin"):
        import_module(f"PIL.{name}")
    for name in ("TiffImagePlugin", "ImagePalette", "ImageFile"):  # of EXIF, palettes, and all formats
        import_module(f"PIL.{name}")
    Image.preinit()


def check_pixels(size: tuple[int, int]) -> None:
    """Check the number of pixels of an image of `size` (width, height).

    Raises:
        InvalidImage: it exceeds MAX_IMAGE_PIXELS.
    """
    width, height = size
    if width * height > MAX_IMAGE_PIXELS:
        raise InvalidImage(
            f"the image has {width} x {height} pixels, more than the maximum of {MAX_IMAGE_PIXELS}"
        )


def turn_upright(image: Image.Image) -> Image.Image:
    """Decode an opened image, and transpose it as `PIL.ImageOps.exif_transpose` does."""
    image.load()
    method = TRANSPOSITIONS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    return image if method is None else image.transpose(method)


def convert_to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to RGB as `transformers.image_transforms.convert_to_rgb` does.

    Transparent images are composed with a white background. Values of 16 bits above 255 become 255.
    """
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        with_alpha = image.convert("RGBA")
        background = Image.new("RGBA", image.size, WHITE)
        return Image.alpha_composite(background, with_alpha).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _open_image(content: bytes, header_size: tuple[int, int]) -> Image.Image:
    """Open an image file of the format that `read_header` finds; the image is decoded later.

    Raises:
        InvalidImage: the displayed size of the image is not `header_size`.
    """
    header = read_header(content)
    image = Image.open(BytesIO(content), formats=(header.format.upper(),))
    if (header.width, header.height) != header_size or sorted(image.size) != sorted(header_size):
        raise _size_mismatch(image.size, header_size)
    return image


def _size_mismatch(size: tuple[int, int], header_size: tuple[int, int]) -> InvalidImage:
    found, expected = (f"{width} x {height}" for width, height in (size, header_size))
    return InvalidImage(f"the image has {found} pixels, but its header says {expected}")
