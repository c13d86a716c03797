# SPDX-License-Identifier: Apache-2.0
"""Reads the header of PNG files (W3C, Portable Network Graphics, third edition), animated ones included."""

from __future__ import annotations

import re
import struct
import zlib

from mizzen.images.formats.orientation import read_orientation
from mizzen.images.types import InvalidImage

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MAX_CHUNKS = 1 << 14
_MAX_TEXT = 1 << 20
"""Largest size of a decompressed text in bytes, as in Pillow."""
_CHUNK_HEADER = struct.Struct(">L4s")
_CHUNK_KIND = re.compile(rb"\w{4}")
_RAW_PROFILE = b"Raw profile type exif"
"""Keyword under which ImageMagick stores EXIF as text in hexadecimal digits."""
_XMP = b"XML:com.adobe.xmp"
_INTERNATIONAL_XMP = b"xmp"
_KEYWORDS = frozenset({_RAW_PROFILE, _XMP, b"exif"})
_METADATA = frozenset({b"eXIf", b"tEXt", b"zTXt", b"iTXt"})
_Text = tuple[bool, bytes]
"""Whether a text is compressed, and the text."""


def read_png(content: bytes) -> tuple[int, int, int]:
    """Return width, height and orientation, as stored.

    Metadata counts before and after the image data. Of texts with the same keyword the last one counts,
    even if it is damaged.

    Raises:
        InvalidImage: the file is damaged, or has too many chunks.
    """
    if len(content) < 33 or content[12:16] != b"IHDR":
        raise InvalidImage("the image is a damaged PNG file: it does not begin with its header")
    width, height = struct.unpack_from(">LL", content, 16)
    texts: dict[bytes, _Text] = {}
    position, seen_data = len(SIGNATURE), False
    for _ in range(_MAX_CHUNKS):
        if position + 8 > len(content):
            break
        length, kind = _CHUNK_HEADER.unpack_from(content, position)
        start = position + 8
        position = start + length + 4
        seen_data = seen_data or kind in (b"IDAT", b"fdAT")
        # The first frame of an animation ends where the control chunk of the second begins.
        if kind == b"IEND" or not _CHUNK_KIND.fullmatch(kind) or (kind == b"fcTL" and seen_data):
            break
        if kind in _METADATA:
            _keep_metadata(kind, content[start : start + length], texts)
    else:
        raise InvalidImage(f"the image is a PNG file with over {_MAX_CHUNKS} chunks: save it again")
    if not seen_data:
        raise InvalidImage("the image is a damaged PNG file: it has no image data")
    # Pillow, too, turns to the international text if the last text of any kind is empty.
    xmp = _read_text(texts.get(_XMP)) or _read_text(texts.get(_INTERNATIONAL_XMP))
    return width, height, read_orientation(_find_exif(texts), xmp)


def _keep_metadata(kind: bytes, chunk: bytes, texts: dict[bytes, _Text]) -> None:
    """Keep the metadata of a chunk by keyword, if it may contain an orientation; EXIF has the keyword `exif`.

    Nothing is decompressed here, because a later chunk may have the same keyword.
    """
    if kind == b"eXIf":
        texts[b"exif"] = False, chunk
        return
    keyword, separator, value = chunk.partition(b"\x00")
    if not separator or keyword not in _KEYWORDS:
        return
    if kind == b"iTXt":
        is_compressed, method = value[:1] != b"\x00", value[1:2]
        parts = value[2:].split(b"\x00", 2)
        if len(parts) == 3 and not (is_compressed and method != b"\x00"):
            texts[keyword] = is_compressed, parts[2]
            if keyword == _XMP:
                texts[_INTERNATIONAL_XMP] = texts[keyword]
    else:
        texts[keyword] = (True, value[1:]) if kind == b"zTXt" else (False, value)


def _read_text(text: _Text | None) -> bytes | None:
    """Return a kept text; None if it is missing or damaged.

    Raises:
        InvalidImage: the text is larger than `_MAX_TEXT` after decompression.
    """
    if text is None:
        return None
    is_compressed, content = text
    return _decompress(content) if is_compressed else content


def _decompress(data: bytes) -> bytes | None:
    try:
        decompressor = zlib.decompressobj()
        text = decompressor.decompress(data, _MAX_TEXT)
    except zlib.error:
        return None
    if decompressor.unconsumed_tail:
        raise InvalidImage(f"the image is a PNG file with over {_MAX_TEXT} bytes of metadata: remove it")
    return text


def _find_exif(texts: dict[bytes, _Text]) -> bytes | None:
    if b"exif" in texts:
        return _read_text(texts[b"exif"])
    profile = _read_text(texts.get(_RAW_PROFILE))
    if profile is None:
        return None
    try:
        return bytes.fromhex(b"".join(profile.split(b"\n")[3:]).decode("ascii"))
    except ValueError:
        return None
