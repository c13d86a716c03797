# SPDX-License-Identifier: Apache-2.0
"""Headers agree with Pillow for files that Pillow writes, and damaged files raise only InvalidImage."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from mizzen.images.header import read_header
from mizzen.images.types import InvalidImage

MODES = {
    "JPEG": ("L", "RGB", "CMYK"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "WEBP": ("RGB", "RGBA", "L"),
    "GIF": ("1", "L", "P", "RGB", "RGBA"),
}


def write(kind: str, mode: str, size: tuple[int, int], **options: Any) -> bytes:
    """Return a file in a format; an image of another mode than RGB is converted from it."""
    file = io.BytesIO()
    Image.new("RGB", size, "red").convert(mode).save(file, kind, **options)
    return file.getvalue()


def displayed_size(content: bytes) -> tuple[int, int]:
    return ImageOps.exif_transpose(Image.open(io.BytesIO(content))).size


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[270] = "a description that is stored after the directory"
    tags[274] = orientation
    return tags


@st.composite
def files(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(sorted(MODES)))
    mode = draw(st.sampled_from(MODES[kind]))
    size = draw(st.tuples(st.integers(1, 300), st.integers(1, 300)).filter(lambda size: size != (1, 1)))
    options: dict[str, Any] = {}
    if kind != "GIF" and draw(st.booleans()):
        options["exif"] = exif(draw(st.integers(0, 9)))
    if kind == "JPEG":
        options["progressive"] = draw(st.booleans())
        options["comment"] = draw(st.binary(max_size=20))
    if kind == "WEBP":
        options["lossless"] = draw(st.booleans())
    return write(kind, mode, size, **options)


@given(content=files())
@settings(max_examples=300)
def test_sizes_are_those_of_pillow(content: bytes) -> None:
    header = read_header(content)
    assert (header.width, header.height) == displayed_size(content)
    assert header.format == (Image.open(io.BytesIO(content)).format or "").lower()


@given(content=files(), data=st.data())
@settings(max_examples=400)
def test_damaged_files_are_refused_or_read(content: bytes, data: st.DataObject) -> None:
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, min(200, len(damaged)) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    for broken in (bytes(damaged), bytes(damaged[:cut])):
        try:
            read_header(broken)
        except InvalidImage as error:
            assert "image" in str(error)


@pytest.mark.parametrize("kind", MODES)
def test_an_image_of_one_pixel_is_refused(kind: str) -> None:
    with pytest.raises(InvalidImage, match="the image has 1 x 1 pixels: at least 2 are required"):
        read_header(write(kind, "L", (1, 1)))
    for size in ((1, 2), (2, 1)):
        header = read_header(write(kind, "L", size))
        assert (header.width, header.height) == size


@pytest.mark.parametrize("content", [b"", b"BM" + bytes(60), b"II*\x00" + bytes(60), b"<svg></svg>"])
def test_other_formats_are_refused_with_the_accepted_ones(content: bytes) -> None:
    with pytest.raises(InvalidImage, match="JPEG, PNG, WebP or GIF"):
        read_header(content)
