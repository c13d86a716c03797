# SPDX-License-Identifier: Apache-2.0
"""Checks of the sizes of images and of the limits that requests set."""

from __future__ import annotations

from dataclasses import fields

from mizzen.images.types import InvalidImage, PixelLimits

MIN_PIXELS = 2
"""Minimum number of pixels of an image; by policy, single pixels are refused, which usually track readers."""
MAX_ASPECT_RATIO = 200


def require_pixels(width: int, height: int) -> None:
    """Check that an image has at least `MIN_PIXELS` pixels.

    Raises:
        InvalidImage: it has fewer.
    """
    if min(width, height) < 1:
        raise InvalidImage(f"the image has {width} x {height} pixels: width and height must be at least 1")
    if width * height < MIN_PIXELS:
        raise InvalidImage(f"the image has {width} x {height} pixels: at least {MIN_PIXELS} are required")


def require_aspect_ratio(width: int, height: int, largest: float = MAX_ASPECT_RATIO) -> None:
    """Check that an image has at least `MIN_PIXELS` pixels and is not too narrow.

    Raises:
        InvalidImage: it has fewer, or one edge is over `largest` times as long as the other.
    """
    require_pixels(width, height)
    if max(width, height) / min(width, height) > largest:
        raise InvalidImage(
            f"the image has {width} x {height} pixels: its longer edge must be at most {largest:g} "
            "times as long as the shorter one"
        )


def refuse_limits(limits: PixelLimits | None, reason: str) -> None:
    """Check that a request sets no limits of pixels.

    Raises:
        InvalidImage: it sets some; the message names them and gives the `reason`.
    """
    if limits is None:
        return
    for field in fields(limits):
        if getattr(limits, field.name) is not None:
            raise InvalidImage(f"{field.name} cannot be set: this model {reason}")
