# SPDX-License-Identifier: Apache-2.0
"""Decompress request bodies with a header Content-Encoding, in small pieces.

`RequestBody` in `request_bodies` limits the size of the decompressed body.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from mizzen.gateway.errors import ACCEPTED_ENCODINGS, ApiError, invalid

PIECE_BYTES = 64 * 1024
"""Maximum number of bytes that are read and written at a time, which takes less than a millisecond."""
GZIP_BITS, ZLIB_BITS, RAW_BITS = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
ENCODINGS = ("gzip", "deflate")


class BodyDecompressor:
    """Incremental decompressor of one body that is compressed with gzip or deflate.

    `deflate` means the zlib format; data without its header is accepted too, because some clients send it.
    """

    def __init__(self, encoding: str) -> None:
        """Create a decompressor; `encoding` is "gzip" or "deflate"."""
        self._encoding = encoding
        self._inner = zlib.decompressobj(GZIP_BITS) if encoding == "gzip" else None
        self._head = b""
        """First byte of a deflate body, while the second is missing."""
        self._started = False

    def decompress(self, part: bytes) -> Iterator[bytes]:
        """Yield the data of the next part of the body, in pieces of at most `PIECE_BYTES`; some may be empty.

        Raises:
            ApiError: 400 if the part is not valid compressed data, or continues after its end.
        """
        for begin in range(0, len(part), PIECE_BYTES):
            yield from self._decompress_piece(part[begin : begin + PIECE_BYTES])

    def finish(self) -> None:
        """Check that the compressed data is complete. An empty body is complete.

        Raises:
            ApiError: 400 if the end is missing.
        """
        if self._started and (self._inner is None or not self._inner.eof):
            raise self._invalid("its end is missing")

    def _decompress_piece(self, rest: bytes) -> Iterator[bytes]:
        self._started = True
        if self._inner is None:
            self._head += rest
            if len(self._head) < 2:
                return
            rest, self._head = self._head, b""
            self._inner = zlib.decompressobj(ZLIB_BITS if has_zlib_header(rest) else RAW_BITS)
        more_output = False
        while rest or (more_output and not self._inner.eof):
            if self._inner.eof:
                raise self._invalid("data follows its end")
            try:
                data = self._inner.decompress(rest, PIECE_BYTES)
            except zlib.error as error:
                raise self._invalid(str(error)) from None
            rest = self._inner.unused_data or self._inner.unconsumed_tail
            more_output = len(data) == PIECE_BYTES  # zlib may hold more, even if it has read all input
            yield data

    def _invalid(self, reason: str) -> ApiError:
        text = f"the body is not valid {self._encoding} data, although Content-Encoding says so: {reason}"
        return invalid(text, code="invalid_content_encoding")


def has_zlib_header(data: bytes) -> bool:
    """Return whether data (at least two bytes) begins with a header of the zlib format (RFC 1950)."""
    return data[0] & 0x0F == zlib.DEFLATED and int.from_bytes(data[:2]) % 31 == 0


def new_decompressor(headers: Iterable[tuple[bytes, bytes]]) -> BodyDecompressor | None:
    """Return the decompressor for a body with these headers; None if the body is not compressed.

    Raises:
        ApiError: 415 if the encoding is not supported, or there are several.
    """
    values = [value.decode("latin-1") for name, value in headers if name == b"content-encoding"]
    names = [name.strip().lower() for name in ",".join(values).split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if not names:
        return None
    encoding = names[0].removeprefix("x-")  # x-gzip is an older name of gzip
    if len(names) > 1 or encoding not in ENCODINGS:
        text = f"Content-Encoding is {', '.join(names)[:80]!r}, which is not supported"
        text = f"{text}: send the body uncompressed, or with one of {ACCEPTED_ENCODINGS}"
        raise ApiError(415, text, code="unsupported_content_encoding")
    return BodyDecompressor(encoding)
