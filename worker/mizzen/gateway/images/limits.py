# SPDX-License-Identifier: Apache-2.0
"""Limits of the images that a request may have, and the error for a part that violates one."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.errors import ApiError

LOW_DETAIL_PIXELS = 512 * 512
"""Largest number of pixels after resizing of an image with `detail: low`."""

IMAGE_ERROR_CODES = (
    "chat_template",
    "image_not_fetched",
    "image_too_large",
    "invalid_image",
    "invalid_type",
    "missing_field",
    "too_many_images",
    "unsupported_content",
)
"""Codes of errors for images; metrics count refused requests by them."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of the images of a request."""

    count: int = 8
    """Maximum number of images."""
    size: int = 10 * 1024 * 1024
    """Maximum size of each image file in bytes."""
    pixels: int = 64_000_000
    """Maximum number of pixels of each image before it is resized."""
    urls: bool = False
    """True if images may be given as https URLs, which the gateway fetches."""


def configured_limits(config: GatewayConfig) -> ImageLimits:
    """Return the limits that the gateway's options set."""
    return ImageLimits(
        config.max_images, config.max_image_bytes, config.max_image_pixels, config.image_urls == "allowed"
    )


class ImagePartError(ApiError):
    """Error response for an image; `param` is the path of its part in the body that the client sent."""

    def __init__(self, path: str, reason: str, code: str = "invalid_image", status: int = 400) -> None:
        super().__init__(status, f"{path}: {reason}", param=path, code=code)
