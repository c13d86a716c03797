# SPDX-License-Identifier: Apache-2.0
"""Files of images in all formats and modes that Mizzen accepts."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

MODES: dict[str, tuple[str, ...]] = {
    "JPEG": ("L", "RGB", "CMYK"),
    "PNG": ("1", "L", "LA", "P", "P+t", "RGB", "RGB+t", "RGBA", "I;16", "RGB16", "RGBA16", "L2"),
    "WEBP": ("RGB", "RGBA", "L"),
    "GIF": ("1", "L", "P", "P+t", "RGB", "frames"),
}
"""Modes by format: Pillow's, or with a transparent color (`+t`), with 16 bits per value, 2 bits per value, or
with further frames."""
COLOR_TYPES = {"RGB16": (2, 3), "RGBA16": (6, 4)}
"""Color type of PNG, and number of channels."""


def write_image(kind: str, mode: str, size: tuple[int, int], seed: int = 0, **options: Any) -> bytes:
    """Return the file of an image with random content, smooth with some noise."""
    source = np.random.default_rng(seed)
    if mode in COLOR_TYPES:
        return write_deep_png(mode, size, source)
    image = random_image(size, source)
    if mode == "I;16":
        values = source.integers(0, 600, (size[1], size[0]), np.uint16)
        image = Image.fromarray(values)
    elif mode == "frames":
        options |= {"save_all": True, "append_images": [image.transpose(Image.Transpose.ROTATE_180)] * 2}
        image = image.convert("P")
    elif mode == "L2":
        image = image.convert("L").quantize(4)
        options["bits"] = 2
    else:
        if mode.endswith("+t"):
            options["transparency"] = 3 if mode == "P+t" else image.getpixel((0, 0))
        image = convert(image, mode.removesuffix("+t"), source)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def random_image(size: tuple[int, int], source: np.random.Generator) -> Image.Image:
    small = Image.fromarray(source.integers(0, 256, (7, 9, 3), np.uint8))
    smooth = np.asarray(small.resize(size, Image.Resampling.BILINEAR), np.int16)
    noise = source.integers(-20, 21, smooth.shape, np.int16)
    return Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8))


def convert(image: Image.Image, mode: str, source: np.random.Generator) -> Image.Image:
    """Convert an image in RGB to a mode; alpha is random."""
    if mode not in ("LA", "RGBA"):
        return image.convert(mode)
    alpha = Image.fromarray(source.integers(0, 256, (image.height, image.width), np.uint8))
    image = image.convert(mode)
    image.putalpha(alpha)
    return image


def write_deep_png(mode: str, size: tuple[int, int], source: np.random.Generator) -> bytes:
    """Return a PNG file with 16 bits per value, which Pillow can read but not write."""
    color_type, channels = COLOR_TYPES[mode]
    width, height = size
    values = source.integers(0, 65536, (height, width * channels), np.uint16).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    header = struct.pack(">LLBBBBB", width, height, 16, color_type, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(name, content) for name, content in parts)


def png_chunk(name: bytes, content: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return struct.pack(">L", len(content)) + name + content + struct.pack(">L", zlib.crc32(name + content))


def orientation_exif(orientation: int) -> Image.Exif:
    """Return EXIF data with an orientation."""
    tags = Image.Exif()
    tags[274] = orientation
    return tags
