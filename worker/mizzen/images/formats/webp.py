# SPDX-License-Identifier: Apache-2.0
"""Reads the header of WebP files (RFC 9649): lossy, lossless and extended ones, animations included."""

from __future__ import annotations

from mizzen.images.formats.orientation import UPRIGHT, read_orientation
from mizzen.images.types import InvalidImage

_MAX_CHUNKS = 1 << 14
_EXIF_FLAG = 0x08
_XMP_FLAG = 0x04


def is_webp(content: bytes) -> bool:
    """Return whether a file begins like a WebP file."""
    return content.startswith(b"RIFF") and content[8:12] == b"WEBP"


def read_webp(content: bytes) -> tuple[int, int, int]:
    """Return width, height and orientation, as stored; for animations, the size of the canvas.

    Raises:
        InvalidImage: the file is damaged, or has too many chunks.
    """
    kind = content[12:16]
    if kind == b"VP8 " and len(content) >= 30 and content[23:26] == b"\x9d\x01\x2a":
        return _read_int(content, 26, 2) & 0x3FFF, _read_int(content, 28, 2) & 0x3FFF, UPRIGHT
    if kind == b"VP8L" and len(content) >= 25 and content[20] == 0x2F:
        bits = _read_int(content, 21, 4)
        return (bits & 0x3FFF) + 1, ((bits >> 14) & 0x3FFF) + 1, UPRIGHT
    if kind == b"VP8X" and len(content) >= 30:
        return _read_int(content, 24, 3) + 1, _read_int(content, 27, 3) + 1, _extended_orientation(content)
    raise InvalidImage("the image is a damaged WebP file: it does not begin with a known header")


def _read_int(content: bytes, start: int, size: int) -> int:
    return int.from_bytes(content[start : start + size], "little")


def _extended_orientation(content: bytes) -> int:
    """Return the orientation by the first EXIF and XMP chunks that the flags of the header announce."""
    flags = content[20]
    wanted = {b"EXIF": flags & _EXIF_FLAG, b"XMP ": flags & _XMP_FLAG}
    found: dict[bytes, bytes] = {}
    position, end = 12, min(len(content), 8 + _read_int(content, 4, 4))
    if not any(wanted.values()):
        return UPRIGHT
    for _ in range(_MAX_CHUNKS):
        if position + 8 > end:
            break
        kind, size = content[position : position + 4], _read_int(content, position + 4, 4)
        start = position + 8
        if wanted.get(kind):
            found.setdefault(kind, content[start : start + size])
        position = start + size + (size & 1)
    else:
        raise InvalidImage(f"the image is a WebP file with over {_MAX_CHUNKS} chunks: save it again")
    return read_orientation(found.get(b"EXIF"), found.get(b"XMP "))
