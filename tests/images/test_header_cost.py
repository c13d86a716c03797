# SPDX-License-Identifier: Apache-2.0
"""Headers of large files made to be slow are read or refused in bounded time."""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable

import pytest
from metadata_files import RAW_PROFILE, XMP_KEY, make_chunk, save

from mizzen.images.header import read_header
from mizzen.images.types import InvalidImage

SIZE = 10 << 20
JPEG = b"\xff\xd8\xff"
JPEG_END = b"\xff\xc0\x00\x0b\x08\x00\x10\x00\x10\x01\x00\x00\x00\xff\xda\x00\x02"
PNG = b"\x89PNG\r\n\x1a\n" + make_chunk(b"IHDR", struct.pack(">LL5B", 5, 5, 8, 0, 0, 0, 0))
GIF = b"GIF89a" + bytes(7)


def repeat(start: bytes, part: bytes, end: bytes = b"") -> bytes:
    return start + part * (SIZE // len(part)) + end


def jpeg_segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def jpeg_with_directory() -> bytes:
    """Return a JPEG file whose EXIF has as many entries as possible, spread over segments."""
    tiff = b"II*\x00\x08\x00\x00\x00\xff\xff" + b"\x00\x01\x03\x00\x01" * 13107 * 12
    segments = (jpeg_segment(0xE1, b"Exif\x00\x00" + tiff[i : i + 65000]) for i in range(0, len(tiff), 65000))
    return JPEG[:2] + b"".join(segments) + JPEG_END


def webp_with_chunks() -> bytes:
    start = b"RIFF" + struct.pack("<L", SIZE) + b"WEBPVP8X" + struct.pack("<L", 10) + b"\x0c" + bytes(9)
    return repeat(start, b"abcd" + bytes(4))


FILES: dict[str, Callable[[], bytes]] = {
    "markers of JPEG": lambda: repeat(JPEG, b"\xff\xd0"),
    "fill bytes of JPEG": lambda: repeat(JPEG, b"\xff"),
    "junk in JPEG": lambda: repeat(JPEG + b"\xd0", b"\x00"),
    "large EXIF of JPEG": lambda: repeat(JPEG[:2], jpeg_segment(0xE1, b"Exif\x00\x00" + bytes(65000))),
    "small EXIF of JPEG": lambda: repeat(JPEG[:2], jpeg_segment(0xE1, b"Exif\x00\x00II")),
    "entries of EXIF": jpeg_with_directory,
    "chunks of PNG": lambda: repeat(PNG, make_chunk(b"abCd", b"")),
    "texts of PNG": lambda: repeat(PNG, make_chunk(b"tEXt", RAW_PROFILE + b"\n\n\n00")),
    "zip bombs in PNG": lambda: repeat(
        PNG, make_chunk(b"zTXt", RAW_PROFILE + b"\x00" + zlib.compress(bytes(1 << 20)))
    ),
    "XMP of PNG": lambda: PNG + make_chunk(b"iTXt", repeat(XMP_KEY + bytes(4), b"tiff:Orientation")),
    "chunks of WebP": webp_with_chunks,
    "extensions of GIF": lambda: repeat(GIF, b"!\x01\x01\x00"),
    "blocks of GIF": lambda: repeat(GIF + b"!\x01", b"\x01a"),
    "junk in GIF": lambda: repeat(GIF, b"\x00"),
}


@pytest.mark.parametrize("name", FILES)
def test_time_is_bounded(name: str) -> None:
    content = FILES[name]()
    start = time.process_time()
    try:
        read_header(content)
    except InvalidImage:
        pass
    assert time.process_time() - start < 0.5  # about 25 ms; without bounds, seconds to minutes


def test_large_texts_are_refused() -> None:
    bomb = make_chunk(b"zTXt", RAW_PROFILE + b"\x00" + zlib.compress(bytes(2 << 20)))
    content = save("PNG")
    with pytest.raises(InvalidImage, match="over 1048576 bytes of metadata"):
        read_header(content[:33] + bomb + content[33:])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
def test_every_beginning_of_a_file_is_read_or_refused(kind: str) -> None:
    content = save(kind)
    for length in range(len(content)):
        try:
            assert read_header(content[:length]).width == 7
        except InvalidImage:
            continue
