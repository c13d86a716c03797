# SPDX-License-Identifier: Apache-2.0
"""Reads the header of GIF files (Graphics Interchange Format, version 89a) up to the first frame."""

from __future__ import annotations

from mizzen.images.types import InvalidImage

SIGNATURES = (b"GIF87a", b"GIF89a")
_MAX_BLOCKS = 1 << 14
_EXTENSION, _IMAGE, _TRAILER = 0x21, 0x2C, 0x3B
_APPLICATION, _COMMENT = 0xFF, 0xFE


def read_gif(content: bytes) -> tuple[int, int]:
    """Return width and height of the first frame as displayed: the canvas, enlarged if the frame is larger.

    Raises:
        InvalidImage: the file is damaged, or has too many blocks before its first frame.
    """
    try:
        width, height = _read_int16(content, 6), _read_int16(content, 8)
        position = _FrameSearch(content).find_frame(13 + _color_table_size(content[10]))
        left, top, frame_width, frame_height = (_read_int16(content, position + 2 * i) for i in range(4))
    except IndexError:
        raise InvalidImage("the image is a damaged GIF file: it has no frame") from None
    return max(width, left + frame_width), max(height, top + frame_height)


def _read_int16(content: bytes, position: int) -> int:
    return content[position] | content[position + 1] << 8


def _color_table_size(flags: int) -> int:
    """Return the size in bytes of the colour table that these flags announce."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


class _FrameSearch:
    """Search for the first frame, which visits at most `_MAX_BLOCKS` blocks.

    It reads blocks as Pillow does: extensions without data blocks take the bytes that follow as data.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._blocks = 0

    def find_frame(self, position: int) -> int:
        """Return the position of the descriptor of the first frame at or after a block's `position`.

        Raises:
            IndexError: the file ends before its first frame.
        """
        while True:
            introducer = self._content[position]
            self._count_block()
            position += 1
            if introducer == _IMAGE:
                return position
            if introducer == _TRAILER:
                raise IndexError
            if introducer == _EXTENSION:
                position = self._skip_extension(position)

    def _skip_extension(self, position: int) -> int:
        label = self._content[position]
        first = position + 1
        position = self._next_block(first)
        if label == _COMMENT and self._content[first] == 0:
            return position
        if label == _APPLICATION and self._content.startswith(b"NETSCAPE2.0", first + 1, position):
            position = self._next_block(position)
        while self._content[position]:
            position = self._next_block(position)
        return position + 1

    def _next_block(self, position: int) -> int:
        """Return the position after the data block at `position`."""
        self._count_block()
        return position + 1 + self._content[position]

    def _count_block(self) -> None:
        self._blocks += 1
        if self._blocks > _MAX_BLOCKS:
            raise InvalidImage(
                f"the image is a GIF file with over {_MAX_BLOCKS} blocks before its first frame"
            )
