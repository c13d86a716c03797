# SPDX-License-Identifier: Apache-2.0
"""Reads the orientation of an image from its metadata, as Pillow's `ImageOps.exif_transpose` does.

It is tag 274 of EXIF (CIPA DC-008, section 4.6.4), or `tiff:Orientation` of XMP if EXIF lacks the tag.
"""

from __future__ import annotations

import re
import struct

UPRIGHT = 1
"""Orientation of an image that is displayed as stored."""
_ORIENTATION_TAG = 274
_EXIF_PREFIX = re.compile(rb"^(Exif\x00\x00){1,2}")
_XMP_TAG = b"tiff:Orientation"
_XMP_DIGIT = re.compile(rb'(?:="|>)([0-9])')
_MAX_ENTRIES = 4096
"""Number of entries of EXIF, and of places in XMP, that are read."""
_BYTE_ORDERS = {b"MM\x00*": ">", b"II*\x00": "<", b"MM*\x00": ">", b"II\x00*": "<", b"MM\x00+": ">"}
"""Byte orders by the first bytes of a TIFF file; faulty programs write the last three."""
_TYPE_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
"""Bytes of a value of each type of TIFF."""
_TYPE_CODES = {3: "H", 4: "L", 6: "b", 8: "h", 9: "l", 11: "f", 12: "d", 13: "L", 16: "Q"}
_RATIONAL_CODES = {5: "LL", 10: "ll"}


def read_orientation(exif: bytes | None, xmp: bytes | None) -> int:
    """Return the orientation, from 1 to 8; metadata that cannot be read counts as 1.

    Args:
        exif: a TIFF file with the tags of EXIF, with or without the prefix `Exif` and two zero bytes.
        xmp: an XMP packet.
    """
    tiff = _EXIF_PREFIX.sub(b"", exif or b"", count=1)
    value = _exif_orientation(tiff) if tiff else None
    if value is None and xmp:
        value = _xmp_orientation(xmp)
    return int(value) if value is not None and value in range(1, 9) else UPRIGHT


def swaps_axes(orientation: int) -> bool:
    """Return whether images with this orientation are displayed with width and height exchanged."""
    return orientation >= 5


def _xmp_orientation(xmp: bytes) -> int | None:
    """Return the first value of the tag; None if it is missing."""
    position = 0
    for _ in range(_MAX_ENTRIES):
        position = xmp.find(_XMP_TAG, position)
        if position < 0:
            break
        position += len(_XMP_TAG)
        if match := _XMP_DIGIT.match(xmp, position):
            return int(match[1])
    return None


def _exif_orientation(tiff: bytes) -> float | None:
    """Return the value of the tag in the first directory; None if it is missing, 0 if it is no number.

    A file that does not begin as TIFF counts as one with value 0, which XMP does not replace.
    """
    order = _BYTE_ORDERS.get(tiff[:4])
    if order is None or len(tiff) < 8:
        return 0
    try:
        return _directory_orientation(tiff, order)
    except struct.error:  # the directory is truncated
        return None


def _directory_orientation(tiff: bytes, order: str) -> float | None:
    """Return the tag's value as `_exif_orientation` does.

    As in Pillow, only the first value of each tag counts, a value outside of the file ends the directory, and
    values that together are larger than the file are skipped.
    """
    (start,) = struct.unpack_from(f"{order}L", tiff, 4)
    (count,) = struct.unpack_from(f"{order}H", tiff, start)
    entry = struct.Struct(f"{order}HHL4s")
    total_size = 0
    seen: set[int] = set()
    for position in range(start + 2, start + 2 + 12 * min(count, _MAX_ENTRIES), 12):
        tag, kind, values, content = entry.unpack_from(tiff, position)
        size = 0 if tag in seen else values * _TYPE_SIZES.get(kind, 0)
        offset = position + 8
        if size > 4:
            total_size += size
            if total_size > len(tiff):
                continue
            (offset,) = struct.unpack(f"{order}L", content)
            if offset + size > len(tiff):
                return None
        if size == 0:
            continue
        if tag == _ORIENTATION_TAG:
            return _read_number(tiff, order, kind, offset)
        seen.add(tag)
    return None


def _read_number(tiff: bytes, order: str, kind: int, offset: int) -> float:
    """Return the first number of a value; 0 for text and bytes."""
    if kind in _RATIONAL_CODES:
        numerator, denominator = struct.unpack_from(order + _RATIONAL_CODES[kind], tiff, offset)
        return numerator / denominator if denominator else 0
    if kind not in _TYPE_CODES:
        return 0
    return struct.unpack_from(order + _TYPE_CODES[kind], tiff, offset)[0]
