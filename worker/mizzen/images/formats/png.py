# SPDX-License-Identifier: Apache-2.0
"""Reads the header of PNG files (W3C, Portable Network Graphics, third edition), animated ones included."""

from __future__ import annotations

import struct
import zlib

from mizzen.images.formats.orientation import read_orientation
from mizzen.images.types import InvalidImage

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MAX_CHUNKS = 1 << 14
_MAX_TEXT = 1 << 20
"""Largest size of a decompressed text in bytes, as in Pillow."""
_CHUNK_HEADER = struct.Struct(">L4s")
_RAW_PROFILE = b"Raw profile type exif"
"""Keyword under which ImageMagick stores EXIF as text in hexadecimal digits."""
_XMP = b"XML:com.adobe.xmp"
_METADATA = frozenset({b"eXIf", b"tEXt", b"zTXt", b"iTXt"})


def read_png(content: bytes) -> tuple[int, int, int]:
    """Return width, height and orientation, as stored.

    Metadata counts before and after the image data.

    Raises:
        InvalidImage: the file is damaged, or has too many chunks.
    """
    if len(content) < 33 or content[12:16] != b"IHDR":
        raise InvalidImage("the image is a damaged PNG file: it does not begin with its header")
    width, height = struct.unpack_from(">LL", content, 16)
    texts: dict[bytes, bytes] = {}
    position, seen_data = len(SIGNATURE), False
    for _ in range(_MAX_CHUNKS):
        if position + 8 > len(content):
            break
        length, kind = _CHUNK_HEADER.unpack_from(content, position)
        start = position + 8
        position = start + length + 4
        seen_data = seen_data or kind in (b"IDAT", b"fdAT")
        # The first frame of an animation ends where the control chunk of the second begins.
        if kind == b"IEND" or (kind == b"fcTL" and seen_data):
            break
        if kind in _METADATA:
            _read_metadata(kind, content[start : start + length], texts)
    else:
        raise InvalidImage(f"the image is a PNG file with over {_MAX_CHUNKS} chunks: save it again")
    if not seen_data:
        raise InvalidImage("the image is a damaged PNG file: it has no image data")
    return width, height, read_orientation(_find_exif(texts), texts.get(_XMP) or texts.get(b"xmp"))


def _read_metadata(kind: bytes, chunk: bytes, texts: dict[bytes, bytes]) -> None:
    """Add the metadata of a chunk to `texts`, by keyword; EXIF has the keyword `exif`."""
    if kind == b"eXIf":
        texts[b"exif"] = chunk
        return
    keyword, separator, value = chunk.partition(b"\x00")
    if keyword not in (_RAW_PROFILE, _XMP, b"exif", b"xmp") or not separator:
        return
    text = _read_international(value) if kind == b"iTXt" else value
    if kind == b"zTXt":
        text = _decompress(value[1:])
    if text is not None:
        texts[keyword] = text


def _read_international(value: bytes) -> bytes | None:
    """Return the text of an iTXt chunk after its keyword; None if it is damaged."""
    parts = value[2:].split(b"\x00", 2)
    if len(value) < 2 or len(parts) < 3:
        return None
    if value[0] == 0:
        return parts[2]
    return _decompress(parts[2]) if value[1] == 0 else None


def _decompress(data: bytes) -> bytes:
    """Return a decompressed text, empty if it is damaged.

    Raises:
        InvalidImage: the text is larger than `_MAX_TEXT`.
    """
    try:
        decompressor = zlib.decompressobj()
        text = decompressor.decompress(data, _MAX_TEXT)
    except zlib.error:
        return b""
    if decompressor.unconsumed_tail:
        raise InvalidImage(f"the image is a PNG file with over {_MAX_TEXT} bytes of metadata: remove it")
    return text


def _find_exif(texts: dict[bytes, bytes]) -> bytes | None:
    if b"exif" in texts:
        return texts[b"exif"]
    profile = texts.get(_RAW_PROFILE)
    if profile is None:
        return None
    try:
        return bytes.fromhex(b"".join(profile.split(b"\n")[3:]).decode("ascii"))
    except ValueError:
        return None
