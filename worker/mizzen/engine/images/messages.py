# SPDX-License-Identifier: Apache-2.0
"""Messages between the engine and a process that decodes images, over a socket of type SOCK_SEQPACKET.

The engine first sends the pickled rules of the model, and the process replies with `DecodeReady`. Each
`DecodeJob` carries the file descriptor of the image's content, and one of memory for the pixels if these do
not fit into the memory that the process keeps; the process replies with `DecodeReply`. Nothing that the
process sends is unpickled.
"""

from __future__ import annotations

from msgspec import Struct

MESSAGE_BYTES = 64 * 1024
"""Maximum size of a message in bytes."""
MAX_ERROR_CHARACTERS = 300
"""Maximum length of an error message that the engine accepts from a process."""


class DecodeReady(Struct, frozen=True, array_like=True):
    """The process has started, or has failed to start."""

    confined: bool = False
    """Whether the kernel restricts the system calls of the process."""
    fault: str = ""
    """Type of the exception that prevented the start; empty if the process is ready."""


class DecodeJob(Struct, frozen=True, array_like=True, kw_only=True):
    """An image to decode."""

    content_bytes: int
    header_size: tuple[int, int]
    """Width and height in pixels, as displayed, according to the file's header."""
    min_pixels: int | None
    max_pixels: int | None
    shape: tuple[int, int, int, int]
    """Shape of the pixels, uint8 [tiles, height, width, 3]."""

    @property
    def pixel_bytes(self) -> int:
        """Size of the pixels in bytes."""
        tiles, height, width, channels = self.shape
        return tiles * height * width * channels


class DecodeReply(Struct, frozen=True, array_like=True):
    """The pixels have been written, or the image is invalid."""

    error: str = ""
    """Description of the problem; empty if decoding succeeded."""
