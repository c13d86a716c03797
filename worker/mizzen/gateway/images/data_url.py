# SPDX-License-Identifier: Apache-2.0
"""Decode images from Base64 text (RFC 4648), or from `data:` URLs that contain such text (RFC 2397).

The decoder of the standard library holds the GIL while it runs; long texts are therefore decoded in pieces.
"""

from __future__ import annotations

import binascii
import time

PIECE_CHARACTERS = 128 * 1024
"""Number of characters that are decoded at a time, which takes about half a millisecond; a multiple of 4."""
MAX_MEDIA_TYPE = 256
"""Maximum length of the part of a `data:` URL before its data."""
_SCHEME = "data:"


class FileTooLarge(ValueError):
    """The file of an image has more bytes than are allowed."""


def is_data_url(url: str) -> bool:
    """Return whether a URL has the scheme `data`."""
    return url[: len(_SCHEME)].lower() == _SCHEME


def decode_data_url(url: str, limit: int) -> bytes:
    """Return the content of a `data:` URL; its media type is not used.

    Raises:
        FileTooLarge: the content has more than `limit` bytes.
        ValueError: the URL has no Base64, or the Base64 is invalid.
    """
    comma = url.find(",", 0, MAX_MEDIA_TYPE)
    if comma < 0 or not url[:comma].lower().endswith(";base64"):
        raise ValueError("the data: URL must have the form data:<media type>;base64,<Base64>")
    return decode_base64(url, limit, comma + 1)


def decode_base64(text: str, limit: int, begin: int = 0) -> bytes:
    """Return the bytes that the Base64 text encodes from the index `begin` on.

    Raises:
        FileTooLarge: the text encodes more than `limit` bytes.
        ValueError: the text is not Base64 with padding.
    """
    length = len(text) - begin
    size = length // 4 * 3 - text.endswith("=") - text.endswith("==")
    if size > limit:
        raise FileTooLarge(f"the image has {size} bytes; at most {limit} are allowed (--max-image-bytes)")
    pieces: list[bytes] = []
    try:
        for start in range(begin, len(text), PIECE_CHARACTERS):
            if pieces:
                time.sleep(0)  # lets other threads run
            pieces.append(binascii.a2b_base64(text[start : start + PIECE_CHARACTERS], strict_mode=True))
    except ValueError:
        pieces, size = [], -1
    content = b"".join(pieces)
    if len(content) != size:  # padding before the end makes a piece shorter
        raise ValueError(
            "the image is not valid Base64 (RFC 4648, section 4, with padding, without line breaks)"
        )
    return content
