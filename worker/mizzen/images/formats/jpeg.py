# SPDX-License-Identifier: Apache-2.0
"""Reads the header of JPEG files (ITU-T T.81, annex B)."""

from __future__ import annotations

import re

from mizzen.images.formats.orientation import read_orientation
from mizzen.images.types import InvalidImage

SIGNATURE = b"\xff\xd8\xff"
_MARKER = re.compile(rb"\xff([^\x00\xff])")
_MAX_MARKERS = 4096
_MAX_JUNK = 1 << 16
"""Largest number of bytes between two segments that belong to no segment."""
_FRAMES = frozenset({*range(0xC0, 0xD0), 0xDE} - {0xC4, 0xC8, 0xCC})
"""Markers of segments that state the size of the image: all SOF markers, and DHP."""
_WITHOUT_LENGTH = frozenset({0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)})
_START_OF_SCAN = 0xDA
_APP1 = 0xE1
_EXIF = b"Exif\x00\x00"
_XMP = b"http://ns.adobe.com/xap/1.0/\x00"


def read_jpeg(content: bytes) -> tuple[int, int, int]:
    """Return width, height and orientation, as stored.

    Raises:
        InvalidImage: the file is damaged before its first scan, or its frame has other samples than 8 bits of
            1, 3 or 4 components.
    """
    size: tuple[int, int] | None = None
    exif: list[bytes] = []
    xmp: bytes | None = None
    position = 1
    for _ in range(_MAX_MARKERS):
        match = _MARKER.search(content, position, position + _MAX_JUNK)
        if match is None or match[1][0] < 0xC0:
            raise InvalidImage("the image is a damaged JPEG file: its header ends without image data")
        marker, position = match[1][0], match.end()
        if marker in _WITHOUT_LENGTH:
            continue
        start = position + 2
        position = start + max(0, int.from_bytes(content[position:start], "big") - 2)
        if position > len(content):
            raise InvalidImage("the image is a damaged JPEG file: its header is cut off")
        if marker in _FRAMES:
            size = _read_frame(content[start:position])
        elif marker == _APP1 and content.startswith(_EXIF, start, position):
            exif.append(content[start + (len(_EXIF) if exif else 0) : position])
        elif marker == _APP1 and content.startswith(_XMP, start, position):
            xmp = content[start + len(_XMP) : position]
        elif marker == _START_OF_SCAN:
            if size is None:
                raise InvalidImage("the image is a damaged JPEG file: it has no frame header")
            return *size, read_orientation(b"".join(exif), xmp)
    raise InvalidImage(f"the image is a JPEG file with over {_MAX_MARKERS} segments before its image data")


def _read_frame(segment: bytes) -> tuple[int, int]:
    """Return width and height of a frame header (T.81, B.2.2)."""
    if len(segment) < 6:
        raise InvalidImage("the image is a damaged JPEG file: its frame header is cut off")
    if segment[0] != 8:
        raise InvalidImage(f"the image is a JPEG file with {segment[0]} bits per sample: use 8 bits")
    if segment[5] not in (1, 3, 4):
        raise InvalidImage(f"the image is a JPEG file with {segment[5]} components: use 1, 3 or 4")
    return int.from_bytes(segment[3:5], "big"), int.from_bytes(segment[1:3], "big")
