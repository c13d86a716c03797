# SPDX-License-Identifier: Apache-2.0
"""Images on their way through the decoder, and their results."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mizzen.core.images.types import Pixels
from mizzen.engine.images.messages import DecodeJob


class DecodeFailure(Enum):
    """Reasons why an image was not decoded."""

    INVALID = "invalid"
    """The file is damaged, or the model does not accept the image."""
    DEADLINE = "deadline"
    """Decoding took too long."""
    CRASH = "crash"
    """The process that decoded the image ended."""
    BUSY = "busy"
    """Too many images were waiting, or the image waited too long."""
    UNAVAILABLE = "unavailable"
    """No process could be started."""


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """Result for an image: its pixels, or the error that prevented decoding."""

    key: bytes
    pixels: Pixels | None
    """Pixels, uint8 [tiles, height, width, 3]; None if there is an error."""
    error: str = ""
    """Description of the problem; empty if decoding succeeded."""
    failure: DecodeFailure | None = None

    @property
    def temporary(self) -> bool:
        """Whether the error is due to the current load and not to the image, so that a retry may succeed."""
        return self.failure in (DecodeFailure.BUSY, DecodeFailure.UNAVAILABLE)


@dataclass(slots=True)
class ImageCounts:
    """Counters of decoded images since the engine started."""

    decoded: int = 0
    failed: dict[DecodeFailure, int] = field(default_factory=lambda: dict.fromkeys(DecodeFailure, 0))
    seconds: float = 0.0
    """Wall time that processes spent on images, in seconds."""
    restarts: int = 0
    """Number of processes that ended or were killed while they were needed."""


@dataclass(slots=True, eq=False)
class DecodeTask:
    """An image that waits or is being decoded."""

    key: bytes
    content: bytes
    rules: bytes
    """Pickled rules of the model."""
    job: DecodeJob
    tenant: int
    submitted: float
    """Time of `time.monotonic` at which the image was submitted, in seconds."""
    taken: bool = False
    """Whether the pool has removed the image from the queue."""
    cancelled: bool = False
    """Whether no request waits for the image, so that its result is dropped."""

    @property
    def source_pixels(self) -> int:
        """Number of pixels before resizing."""
        width, height = self.job.header_size
        return width * height

    def failed(self, error: str, failure: DecodeFailure) -> DecodedImage:
        """Return the result of a failed image."""
        return DecodedImage(self.key, None, error, failure)
