# SPDX-License-Identifier: Apache-2.0
"""Complete the prompt of a request with its images: one token for each embedding replaces a placeholder."""

from __future__ import annotations

import asyncio

from mizzen.core.request import Int32
from mizzen.gateway.errors import invalid
from mizzen.gateway.images.limits import ImagePartError
from mizzen.gateway.images.request_images import RequestImage, RequestImages
from mizzen.gateway.requests.images import PromptImageBytes
from mizzen.images.digest import image_digest
from mizzen.images.prompt import expand_placeholders
from mizzen.images.types import ImageGeometry, ImageRules, InvalidImage, PixelLimits

INLINE_BYTES = 256 * 1024
"""Total size of images that are hashed on the event loop; larger ones are hashed in a thread."""
PIXELS_FIELD = "mm_processor_kwargs"
_ANY_EDGE = 256


def check_readable(images: RequestImages, rules: ImageRules | None, model: str) -> ImageRules:
    """Return the rules of the model that is to read the images of a request.

    Raises:
        ImagePartError: the model reads text only.
        ApiError: 400 if the model does not accept the request's bounds on pixels.
    """
    if rules is None:
        path = next(iter(images)).path
        raise ImagePartError(
            path, f"the model {model[:80]} reads text only, no images", "unsupported_content"
        )
    if images.pixels is not None:
        try:
            rules.geometry(_ANY_EDGE, _ANY_EDGE, images.pixels)
        except InvalidImage as error:
            raise invalid(f"{PIXELS_FIELD}: {error}", PIXELS_FIELD, "out_of_range") from None
    return rules


async def add_images(
    ids: Int32, images: RequestImages, rules: ImageRules
) -> tuple[Int32, tuple[PromptImageBytes, ...]]:
    """Return a prompt's token ids with one token for each embedding, and the images with their positions.

    `ids` (int32 [n]) has one placeholder for each image. Images with URLs are fetched.

    Raises:
        ApiError: 400 if an image could not be fetched, is invalid or has a size that the model does not
            accept, or if the chat template did not show each image exactly once.
    """
    shown = int((ids == rules.placeholder_id).sum())
    if shown != len(images):
        path = next(iter(images)).path
        raise ImagePartError(
            path, f"the chat template shows {shown} of {len(images)} images", "chat_template"
        )
    await images.load()
    if images.size <= INLINE_BYTES:
        return _expand(ids, images, rules)
    return await asyncio.to_thread(_expand, ids, images, rules)


def _expand(
    ids: Int32, images: RequestImages, rules: ImageRules
) -> tuple[Int32, tuple[PromptImageBytes, ...]]:
    limits = [image.pixel_limits(rules, images.pixels) for image in images]
    geometries = [_geometry(image, rules, bounds) for image, bounds in zip(images, limits, strict=True)]
    expanded, positions = expand_placeholders(ids, geometries, rules)
    return expanded, tuple(
        PromptImageBytes(
            digest=image_digest(image.content, rules, geometry),
            content=image.content,
            positions=places,
            width=image.header.width,
            height=image.header.height,
            limits=bounds,
        )
        for image, geometry, places, bounds in zip(images, geometries, positions, limits, strict=True)
    )


def _geometry(image: RequestImage, rules: ImageRules, limits: PixelLimits | None) -> ImageGeometry:
    try:
        return rules.geometry(image.header.width, image.header.height, limits)
    except InvalidImage as error:
        raise ImagePartError(image.path, str(error)) from None
