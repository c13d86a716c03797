# SPDX-License-Identifier: Apache-2.0
"""Images of a prompt on the gateway's side, with the bytes that an engine may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mizzen.core.request import Int32
from mizzen.images.types import PixelLimits
from mizzen.wire.messages import ImageReference


@dataclass(frozen=True, slots=True)
class PromptImageBytes:
    """An image of a prompt.

    Its bytes are kept until the request ends, because each engine that runs the request may ask for them.
    They count towards the gateway's bytes in work.
    """

    digest: bytes
    """Digest of the image (`mizzen.images.digest`), 32 bytes."""
    content: bytes
    """The image file."""
    positions: Int32
    """Indices of the placeholders in the prompt that the embeddings replace, in order, int32 [embeddings]."""
    width: int
    """Width in pixels as displayed, according to the header of the file."""
    height: int
    """Height in pixels as displayed."""
    limits: PixelLimits | None = None
    """Bounds of the number of pixels after resizing; None if the request sets none."""


def image_references(images: Sequence[PromptImageBytes]) -> tuple[ImageReference, ...]:
    """Return the references that are sent to an engine in place of the images, in the same order."""
    return tuple(
        ImageReference(
            digest=image.digest,
            positions=np.ascontiguousarray(image.positions, dtype="<i4").tobytes(),
            size=len(image.content),
            width=image.width,
            height=image.height,
            min_pixels=image.limits.min_pixels if image.limits else None,
            max_pixels=image.limits.max_pixels if image.limits else None,
        )
        for image in images
    )
