# SPDX-License-Identifier: Apache-2.0
"""Images of a prompt on the gateway's side, with the bytes that an engine may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mizzen.core.images.keys import image_token
from mizzen.core.request import Int32
from mizzen.images.types import PixelLimits
from mizzen.wire.client.image_upload import SentImage
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


def sent_images(images: Sequence[PromptImageBytes]) -> tuple[SentImage, ...]:
    """Return the images as they are sent to an engine: references, and bytes that it may request."""
    return tuple(
        SentImage(
            ImageReference(
                digest=image.digest,
                positions=np.ascontiguousarray(image.positions, dtype="<i4").tobytes(),
                size=len(image.content),
                width=image.width,
                height=image.height,
                min_pixels=image.limits.min_pixels if image.limits else None,
                max_pixels=image.limits.max_pixels if image.limits else None,
            ),
            image.content,
        )
        for image in images
    )


def cached_tokens_of(ids: Int32, images: Sequence[PromptImageBytes]) -> Int32:
    """Return the token ids by which an engine's prefix cache knows a prompt, int32 [n].

    In place of placeholders they have the ids of the images, so that block hashes distinguish images.

    Args:
        ids: token ids of the prompt, int32 [n].
        images: images of the prompt.
    """
    if not images:
        return ids
    tokens = ids.copy()
    for image in images:
        tokens[image.positions] = image_token(image.digest)
    return tokens


def text_tokens_before(images: Sequence[PromptImageBytes], prompt_tokens: int) -> int:
    """Return the number of tokens before the first image, or `prompt_tokens` without images."""
    return min((int(image.positions[0]) for image in images if len(image.positions)), default=prompt_tokens)
